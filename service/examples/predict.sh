#!/bin/sh
# Send image files with curl and print the replies: sh predict.sh URL FILE...
# --retry waits as long as Retry-After says, and X-Request-Timeout is the deadline of the service.
set -eu
url=$1
shift
for file in "$@"; do
    curl --silent --show-error --fail-with-body --retry 5 --max-time 30 \
        --header 'X-Request-Timeout: 10' --header 'Content-Type: application/octet-stream' \
        --data-binary "@$file" "$url/predict"
    echo
done
