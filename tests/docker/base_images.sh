#!/usr/bin/env bash
# Make the images that the Dockerfile and docker-compose.yml name, where no registry can be reached.
#
#   base_images.sh FOLDER     as root, with DOCKER_HOST set; FOLDER keeps what it made for the next time
#
# Python's is a small Debian with this machine's certificates and pip settings; Prometheus' and Alertmanager's are the
# same with this machine's binaries, laid out as in the published images. Grafana is in no Debian, so there is none.
set -euo pipefail
folder=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
named() { sed -n "s#^ *image: \($1:.*\)#\1#p" "$root/docker-compose.yml"; }
mkdir -p "$folder/context"

if [ ! -s "$folder/base.tar" ]; then
    # perl comes with the package that merges /usr, which has done its work by then.
    mmdebstrap --quiet --variant=minbase --include=usr-is-merged,python3,python3-venv,ca-certificates \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='chroot "$1" apt-get purge --quiet --yes usrmerge perl "^perl-modules-.*" "^libperl5.*"' \
        --customize-hook='cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"' \
        --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/*' \
        "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder/base.part.tar" >"$folder/base.log" 2>&1
    mv "$folder/base.part.tar" "$folder/base.tar"
fi
docker import "$folder/base.tar" qualms-test-base

# pip's settings of this machine, so that an index of its own is used; settings that name local folders are left out.
pip config list 2>/dev/null | sed -n "s/^\(global\|:env:\)\.\(index-url\|cert\|timeout\)='\(.*\)'$/\2 = \3/p" | sort -u -t= -k1,1 \
    | sed '1i [global]' >"$folder/context/pip.conf"
cp -L /usr/bin/prometheus /usr/bin/prometheus-alertmanager /bin/busybox "$folder/context/"
cp -rL /usr/share/prometheus/alertmanager "$folder/context/templates"  # Debian's reads from there what others have inside

docker build --quiet --network none --tag python:3.11-slim --file - "$folder/context" <<'DOCKERFILE'
FROM qualms-test-base
COPY pip.conf /etc/pip.conf
DOCKERFILE
docker build --quiet --network none --tag "$(named prom/prometheus)" --file - "$folder/context" <<'DOCKERFILE'
FROM qualms-test-base
COPY prometheus /bin/prometheus
COPY busybox /bin/wget
RUN mkdir -p /etc/prometheus /prometheus && chown 65534:65534 /prometheus
ENTRYPOINT ["/bin/prometheus"]
DOCKERFILE
docker build --quiet --network none --tag "$(named prom/alertmanager)" --file - "$folder/context" <<'DOCKERFILE'
FROM qualms-test-base
COPY prometheus-alertmanager /bin/alertmanager
COPY templates /usr/share/prometheus/alertmanager
COPY busybox /bin/wget
RUN mkdir -p /etc/alertmanager /alertmanager && chown 65534:65534 /alertmanager
ENTRYPOINT ["/bin/alertmanager"]
DOCKERFILE
