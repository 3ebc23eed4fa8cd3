"""The errors of the client. An image that cannot be sent raises `qualms.errors.ImageError`.

ClientError
├── ProblemError        the service replied with an error; has the problem document
├── DeadlineError       there was no reply in time; also a TimeoutError
├── UnreachableError    no connection to the service; also a ConnectionError
└── ReplyError          a reply that is not one of this service
"""

import re

from qualms.errors import QualmsError
from qualms.replies import ProblemReply

_IMAGE_FIELD = re.compile(r"images\[(\d+)\]")


class ClientError(QualmsError):
    """A request got no result; `image` is the number in the call of the image that is to blame, None if unknown."""

    image: int | None = None


class ProblemError(ClientError):
    """The service replied with an error.

    `problem` is the whole document (RFC 9457); `status`, `type`, `title`, `detail` and `request_id` are its members.
    `retry_after` is the value of that header in seconds, None if there was none.
    """

    def __init__(self, problem: ProblemReply, retry_after: float | None = None) -> None:
        request = f" (request id {problem.request_id})" if problem.request_id else ""
        super().__init__(f"The service replied with {problem.status}: {problem.detail}{request}")
        self.problem = problem
        self.status, self.type, self.title, self.detail = problem.status, problem.type, problem.title, problem.detail
        self.request_id = problem.request_id
        self.retry_after = retry_after

    def locate(self, first: int, count: int) -> None:
        """Set `image` for a request with images `first` to `first + count - 1` of the call."""
        match = _IMAGE_FIELD.fullmatch(self.problem.field or "")
        if match:
            self.image = first + int(match[1])


class DeadlineError(ClientError, TimeoutError):
    """There was no reply in time; `last` is the error of the last attempt that was answered, None if none was."""

    def __init__(self, message: str, last: ClientError | None = None) -> None:
        super().__init__(message)
        self.last = last


class UnreachableError(ClientError, ConnectionError):
    """There is no connection to the service, or it broke before the reply."""


class ReplyError(ClientError):
    """The reply is not one of this service."""
