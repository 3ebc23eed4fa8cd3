"""The client's address behind proxies."""

import pytest

from qualms.access.proxies import TrustedProxies

PROXIES = TrustedProxies("10.0.0.0/8, 2001:db8::1")


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("10.0.0.1", {}, "10.0.0.1"),
        ("10.0.0.1", {b"x-forwarded-for": b"192.0.2.7"}, "192.0.2.7"),
        ("10.0.0.1", {b"x-forwarded-for": b"198.51.100.1, 192.0.2.7"}, "192.0.2.7"),
        ("10.0.0.1", {b"x-forwarded-for": b"192.0.2.7, 10.9.9.9"}, "192.0.2.7"),
        ("10.0.0.1", {b"x-forwarded-for": b"10.0.0.5,10.0.0.6"}, "10.0.0.5"),
        ("10.0.0.1", {b"x-forwarded-for": b"192.0.2.7, nobody"}, "10.0.0.1"),
        ("10.0.0.1", {b"x-forwarded-for": b"192.0.2.7, nobody, 10.0.0.9"}, "10.0.0.9"),
        ("10.0.0.1", {b"x-forwarded-for": b""}, "10.0.0.1"),
        ("10.0.0.1", {b"x-forwarded-for": b"<script>\r\n\x00"}, "10.0.0.1"),
        ("10.0.0.1", {b"forwarded": b"for=192.0.2.7;proto=https"}, "192.0.2.7"),
        ("10.0.0.1", {b"forwarded": b'proto=https;For="192.0.2.7:4711"'}, "192.0.2.7"),
        ("10.0.0.1", {b"forwarded": b'for="[2001:db8::7]:80", for=10.0.0.3'}, "2001:db8::7"),
        ("10.0.0.1", {b"forwarded": b"for=unknown"}, "10.0.0.1"),
        ("10.0.0.1", {b"forwarded": b"for=_hidden, for=_gazonk:8080"}, "10.0.0.1"),
        ("10.0.0.1", {b"forwarded": b'for="_a,_b";by=10.0.0.1, for=192.0.2.7'}, "192.0.2.7"),
        ("10.0.0.1", {b"forwarded": b'for="open, for=192.0.2.7'}, "192.0.2.7"),
        ("10.0.0.1", {b"forwarded": b"proto=https"}, "10.0.0.1"),
        ("10.0.0.1", {b"forwarded": b"for=2001:db8::7"}, "2001:db8::7"),
        ("10.0.0.1", {b"x-forwarded-for": b"192.0.2.7:4711"}, "192.0.2.7"),
        ("10.0.0.1", {b"x-forwarded-for": b"[2001:db8::7]:4711, 10.0.0.2:80"}, "2001:db8::7"),
        ("10.0.0.1", {b"x-forwarded-for": b"2001:db8::7"}, "2001:db8::7"),
        ("10.0.0.1", {b"forwarded": b"for=192.0.2.7", b"x-forwarded-for": b"192.0.2.7"}, "192.0.2.7"),
        ("10.0.0.1", {b"forwarded": b"for=192.0.2.7", b"x-forwarded-for": b"192.0.2.8"}, "10.0.0.1"),
        ("2001:db8::1", {b"x-forwarded-for": b"192.0.2.7"}, "192.0.2.7"),
        ("::ffff:10.0.0.1", {b"x-forwarded-for": b"192.0.2.7"}, "192.0.2.7"),
        ("192.0.2.1", {b"x-forwarded-for": b"10.0.0.1"}, "192.0.2.1"),
        ("192.0.2.1", {b"forwarded": b"for=10.0.0.1"}, "192.0.2.1"),
        ("", {b"x-forwarded-for": b"192.0.2.7"}, ""),
    ],
)
def test_only_headers_of_listed_proxies_are_read(peer: str, headers: dict[bytes, bytes], client: str) -> None:
    assert PROXIES.client(peer, headers) == client


def test_without_listed_proxies_no_header_is_read() -> None:
    assert TrustedProxies(None).client("10.0.0.1", {b"x-forwarded-for": b"192.0.2.7"}) == "10.0.0.1"


def test_long_headers_are_read_from_their_end() -> None:
    assert PROXIES.client("10.0.0.1", {b"x-forwarded-for": b"10.0.0.2," * 9000 + b"192.0.2.7"}) == "192.0.2.7"


@pytest.mark.parametrize("text", ["localhost", "10.0.0.1/33", "10.0.0.1/8", "10.0.0.1;10.0.0.2"])
def test_networks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        TrustedProxies(text)
