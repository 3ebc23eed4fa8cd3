"""Where the service is in its life: loading, ready, draining."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.model import ServedModel

Headers = list[tuple[bytes, bytes]]


@dataclass
class ServiceState:
    """Shared by all routes; changed by the loader and by the signal handler only."""

    model: "ServedModel | None" = None
    draining: bool = False
    failure: str | None = None
    in_progress: Callable[[], int] = lambda: 0
    """requests that are read but not answered; 0 where the server does not tell"""
    connections: Callable[[], int] = lambda: 0
    """that are open; 0 where the server does not tell"""

    @property
    def why_not_ready(self) -> str | None:
        """One sentence, or None when predictions are answered and more may come."""
        if self.failure:
            return self.failure
        if self.model is None:
            return "The model is still loading."
        return "The service is stopping." if self.draining else None

    @property
    def closing_headers(self) -> Headers:
        """While draining, every reply asks its client to come back on a new connection, elsewhere."""
        return [(b"connection", b"close")] if self.draining else []
