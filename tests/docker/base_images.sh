#!/usr/bin/env bash
# Build stand-ins for the images that the Dockerfile and docker-compose.yml use, without access to a registry.
#
#   base_images.sh FOLDER     as root, with DOCKER_HOST set; FOLDER caches the Debian base
#
# The Python image is a small Debian with the host's certificates and pip settings. The images of Prometheus and
# Alertmanager add the host's binaries at the paths of the published images. Debian has no Grafana, so there is no image.
set -euo pipefail
folder=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
compose_image() { sed -n "s#^ *image: \($1:[^@]*\).*#\1#p" "$root/docker-compose.yml"; }
mkdir -p "$folder/context"

if [ ! -s "$folder/base.tar" ]; then
    # perl is only a dependency of usrmerge, which has already run when the hook removes both.
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

# The host's pip settings, for its package index; settings with local folders are left out.
pip config list 2>/dev/null | sed -n "s/^\(global\|:env:\)\.\(index-url\|cert\|timeout\)='\(.*\)'$/\2 = \3/p" | sort -u -t= -k1,1 \
    | sed '1i [global]' >"$folder/context/pip.conf"
cp -L /usr/bin/prometheus /usr/bin/prometheus-alertmanager /bin/busybox "$folder/context/"
cp -rL /usr/share/prometheus/alertmanager "$folder/context/templates"  # Debian's Alertmanager reads its templates from this path

docker build --quiet --network none --tag python:3.11-slim --file - "$folder/context" <<'DOCKERFILE'
FROM qualms-test-base
COPY pip.conf /etc/pip.conf
DOCKERFILE
docker build --quiet --network none --tag "$(compose_image prom/prometheus)" --file - "$folder/context" <<'DOCKERFILE'
FROM qualms-test-base
COPY prometheus /bin/prometheus
COPY busybox /bin/wget
RUN mkdir -p /etc/prometheus /prometheus && chown 65534:65534 /prometheus
ENTRYPOINT ["/bin/prometheus"]
DOCKERFILE
docker build --quiet --network none --tag "$(compose_image prom/alertmanager)" --file - "$folder/context" <<'DOCKERFILE'
FROM qualms-test-base
COPY prometheus-alertmanager /bin/alertmanager
COPY templates /usr/share/prometheus/alertmanager
COPY busybox /bin/wget
RUN mkdir -p /etc/alertmanager /alertmanager && chown 65534:65534 /alertmanager
ENTRYPOINT ["/bin/alertmanager"]
DOCKERFILE
