"""The address of the client behind proxies: `Forwarded` and `X-Forwarded-For` are read only if a listed proxy sent them."""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_HOPS = 32
"""addresses at the end of the headers that are read"""
_MAX_BYTES = 4096
_FOR = re.compile(r'for=(?:"([^"\\]*)"|([^"]*))', re.IGNORECASE)
"""the client in the header Forwarded (RFC 7239), with or without quotes"""
_WITH_PORT = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::\d{1,5})?|([0-9.]+):\d{1,5}")
"""an address of IPv6 in brackets, or of IPv4 with a port"""


class TrustedProxies:
    """The proxies whose headers are believed."""

    def __init__(self, networks: str | None = None) -> None:
        """`networks` are addresses and networks, separated by commas; ValueError if one is neither."""
        self._networks: list[Network] = []
        for text in (networks or "").split(","):
            if text.strip():
                self._networks.append(ipaddress.ip_network(text.strip()))

    def client(self, peer: str, headers: Mapping[bytes, bytes]) -> str:
        """The client's address: that of the connection, or the last one in a header that is not a proxy's.

        Addresses further left were written by the sender of the request, and are not read. Most proxies write one of the two
        headers and pass the other one on, so if both give different addresses, the sender may have written one of them, and
        neither is used.
        """
        if not self._networks or not self._trusts(peer):
            return peer
        given = {self._last(peer, hops) for hops in _headers(headers)}
        return given.pop() if len(given) == 1 else peer

    def _last(self, peer: str, hops: list[str]) -> str:
        client = peer
        for hop in reversed(hops):
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


def _headers(headers: Mapping[bytes, bytes]) -> Iterator[list[str]]:
    """The elements of Forwarded and of X-Forwarded-For that should be addresses, for each that is there."""
    for name, client_of in ((b"forwarded", _forwarded_for), (b"x-forwarded-for", str.strip)):
        if text := headers.get(name):
            elements = text[-_MAX_BYTES:].decode("latin-1").split(",")[-_MAX_HOPS:]
            yield [_without_port(client_of(element)) for element in elements]


def _forwarded_for(element: str) -> str:
    for pair in element.split(";"):
        if match := _FOR.fullmatch(pair.strip()):
            return match[1] or match[2] or ""
    return ""


def _without_port(text: str) -> str:
    match = _WITH_PORT.fullmatch(text)
    return text if match is None else match[1] or match[2]


@lru_cache(maxsize=1024)
def _address(text: str) -> Address | None:
    """An address, of which IPv4 in IPv6 form becomes IPv4; None if it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
