"""Whether others may reach the service without a key: refused unless it is intended, and logged at start."""

import logging
import socket
from ipaddress import ip_address

from qualms.settings import Settings, SettingsError

_log = logging.getLogger("qualms.server")


def check_exposure(settings: Settings) -> None:
    """Refuse to listen on other addresses than loopback without keys, unless that is intended."""
    if settings.keys_file or settings.tls_client_ca or settings.allow_anonymous or is_loopback(settings.host):
        return
    raise SettingsError(
        f"QUALMS_HOST is {settings.host!r}, so others may reach the service, and it has no keys: set QUALMS_KEYS_FILE, or "
        "QUALMS_ALLOW_ANONYMOUS=true if anyone who reaches it may use it."
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address or a host name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
    except (OSError, ValueError):  # listening will fail, too
        return False


def log_exposure(settings: Settings) -> None:
    """Log who may use the service."""
    if settings.keys_file is not None:
        _log.info("requests need an API key", extra={"keys_file": settings.keys_file})
    elif settings.tls_client_ca is not None:
        _log.info("requests need a client certificate", extra={"client_ca": settings.tls_client_ca})
    elif is_loopback(settings.host):
        _log.info("no API key is needed; only this machine can reach the service")
    else:
        _log.warning("no API key is needed; anyone who can reach the service may use it")
