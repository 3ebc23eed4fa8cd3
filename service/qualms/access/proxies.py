"""The address of the client behind proxies: `Forwarded` and `X-Forwarded-For` are read only if a listed proxy sent them."""

import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_HOPS = 32
"""addresses at the end of the headers that are read"""
_MAX_BYTES = 4096
_FOR = re.compile(r'for="?\[?([0-9A-Fa-f:.]+?)\]?(?::\d{1,5})?"?', re.IGNORECASE)
"""an address in the header Forwarded (RFC 7239), which may have a port"""


class TrustedProxies:
    """The proxies whose headers are believed."""

    def __init__(self, networks: str | None = None) -> None:
        """`networks` are addresses and networks, separated by commas; ValueError if one is neither."""
        self._networks: list[Network] = []
        for text in (networks or "").split(","):
            if text.strip():
                self._networks.append(ipaddress.ip_network(text.strip()))

    def client(self, peer: str, headers: Mapping[bytes, bytes]) -> str:
        """The client's address: that of the connection, or the last one in the headers that is not a proxy's.

        Addresses further left were written by whoever sent the request, and are not read.
        """
        if not self._networks or not self._trusts(peer):
            return peer
        client = peer
        for hop in reversed(_hops(headers)):
            address = _address(hop)
            if address is None:
                break
            client = str(address)
            if not self._trusts(client):
                break
        return client

    def _trusts(self, text: str) -> bool:
        address = _address(text)
        return address is not None and any(address in network for network in self._networks)


def _hops(headers: Mapping[bytes, bytes]) -> list[str]:
    """The addresses in Forwarded or, without it, X-Forwarded-For; what is not an address becomes an empty string."""
    forwarded = headers.get(b"forwarded")
    text = headers.get(b"x-forwarded-for", b"") if forwarded is None else forwarded
    elements = text[-_MAX_BYTES:].decode("latin-1").split(",")[-_MAX_HOPS:]
    if forwarded is None:
        return [element.strip() for element in elements] if text else []
    return [_forwarded_for(element) for element in elements]


def _forwarded_for(element: str) -> str:
    for pair in element.split(";"):
        if match := _FOR.fullmatch(pair.strip()):
            return match[1]
    return ""


@lru_cache(maxsize=1024)
def _address(text: str) -> Address | None:
    """An address, of which IPv4 in IPv6 form becomes IPv4; None if it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
