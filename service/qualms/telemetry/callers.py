"""The sender of a request in its log line: the name of its key and the client's address."""

from collections.abc import Mapping

from qualms.access.proxies import TrustedProxies
from qualms.http1.exchange import Caller


class Callers:
    """Fields of log lines."""

    def __init__(self, trusted_proxies: str | None) -> None:
        self._proxies = TrustedProxies(trusted_proxies)

    def fields(self, peer: str, headers: Mapping[bytes, bytes], caller: Caller | None) -> dict[str, str]:
        """Address and name, without those that are unknown."""
        client = self._proxies.client(peer, headers)
        fields = {"client": client, "key": "" if caller is None else caller.name}
        return {name: value for name, value in fields.items() if value}
