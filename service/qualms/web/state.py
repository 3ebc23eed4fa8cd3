"""Where the service is in its life: loading, ready, draining."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qualms.web.uploads import Uploads

if TYPE_CHECKING:
    from qualms.web.served_model import ServedModel

Headers = list[tuple[bytes, bytes]]


@dataclass
class ServiceState:
    """Shared by all routes; changed by the loader and by the signal handler only."""

    model: "ServedModel | None" = None
    draining: bool = False
    failure: str | None = None
    tasks: Callable[[], int] = lambda: 0
    """requests that were begun and are not answered; 0 where the server does not tell"""
    connections: Callable[[], int] = lambda: 0
    """that are open; 0 where the server does not tell"""
    uploads: Uploads = field(default_factory=Uploads)

    def in_progress(self) -> int:
        """Requests that were read whole and are not answered. Who still sends keeps nobody waiting."""
        return self.tasks() - self.uploads.count

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
