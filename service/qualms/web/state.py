"""The state of the service: loading, ready or draining."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qualms.web.bodies import UploadBudget
from qualms.web.problems import Kind, Problem

if TYPE_CHECKING:
    from qualms.web.served_model import ServedModel

CLOSE = (b"connection", b"close")


@dataclass
class ServiceState:
    """Shared by all routes; changed only by the loader, the server and the signal handler."""

    model: "ServedModel | None" = None
    draining: bool = False
    failure: str | None = None
    tasks: Callable[[], int] = lambda: 0
    """number of requests that were started and are not answered; 0 if the server does not report it"""
    connections: Callable[[], int] = lambda: 0
    """number of open connections; 0 if the server does not report it"""
    uploads: UploadBudget = field(default_factory=UploadBudget)

    def in_progress(self) -> int:
        """Requests that were read completely and are not answered. Slow uploads do not count."""
        return self.tasks() - self.uploads.count

    def ready_model(self) -> "ServedModel":
        """The model; a Problem if it is not loaded."""
        if self.model is None:
            raise Problem(Kind.UNAVAILABLE, self.why_not_ready or "The model is still loading.")
        return self.model

    @property
    def why_not_ready(self) -> str | None:
        """One sentence, or None if the service is ready."""
        if self.failure:
            return self.failure
        if self.model is None:
            return "The model is still loading."
        return "The service is stopping." if self.draining else None

    @property
    def closing_headers(self) -> list[tuple[bytes, bytes]]:
        """While draining, every reply closes its connection, so that the client reconnects to another instance."""
        return [CLOSE] if self.draining else []
