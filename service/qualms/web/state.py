"""The state of the service: loading, ready or draining."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qualms.http1.body import BodyMemory
from qualms.web.problems import Kind, Problem

if TYPE_CHECKING:
    from qualms.web.served_model import ServedModel


@dataclass
class ServiceState:
    """Shared by all routes; changed only by the loader, the server and the signal handler."""

    model: "ServedModel | None" = None
    draining: bool = False
    failure: str | None = None
    in_progress: Callable[[], int] = lambda: 0
    """number of requests that were read completely and are not answered; 0 if the server does not report it"""
    connections: Callable[[], int] = lambda: 0
    """number of open connections; 0 if the server does not report it"""
    bodies: BodyMemory = field(default_factory=BodyMemory)
    """memory of request bodies, from their arrival until they are decoded"""

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
        return "The service is stopping." if self.draining else self.model.why_failing
