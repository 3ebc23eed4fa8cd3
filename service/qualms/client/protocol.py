"""The shared part of the two clients: URLs, headers, queries and replies of the service."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from qualms.client.errors import ClientError, ProblemError, ReplyError
from qualms.client.images import Chunk
from qualms.client.retries import Attempts, retry_after, utc_now
from qualms.errors import ParameterError, first_line
from qualms.replies import PredictReply, ProblemReply, RequestLimits, Result

MAX_REPLY_BYTES = 256 * 2**20
"""64 images with all entries of α for 50,000 classes take 50 MB"""
MAX_CONNECTIONS = 100
KEEP_ALIVE_SECONDS = 30.0
"""less than the service's 75, so that the client closes idle connections first"""
_API_KEY = re.compile(r"[!-~]{1,512}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")
_OWN_HEADERS = frozenset({"content-length", "content-type", "transfer-encoding", "x-request-timeout"})
_MAX_PORT = 65535
CONNECTIONS = httpx.Limits(
    max_connections=MAX_CONNECTIONS,
    max_keepalive_connections=MAX_CONNECTIONS,
    keepalive_expiry=KEEP_ALIVE_SECONDS,
)


class _Published(BaseModel):
    """The part of `GET /models` that the client reads."""

    limits: RequestLimits


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `predict`: where its requests go, and when it must be over."""

    url: httpx.URL
    deadline: float
    """by time.monotonic; infinite if the call has none"""
    seconds: float


class Protocol:
    """The options of a client, and all that follows from them without a connection."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        headers: Mapping[str, str] | None,
        api_key: str | None,
        request_timeout: float,
        retries: int | None,
        concurrency: int,
    ) -> None:
        address = _base_url(url)
        if not 0 < request_timeout < math.inf:
            raise ParameterError(f"request_timeout is {request_timeout!r}; accepted: seconds, more than 0.")
        if retries is not None and retries < 0:
            raise ParameterError(f"retries is {retries!r}; accepted: None, 0 or more.")
        if not 1 <= concurrency <= MAX_CONNECTIONS:
            raise ParameterError(f"concurrency is {concurrency!r}; accepted: 1 to {MAX_CONNECTIONS}.")
        self.base = str(address.copy_with(userinfo=b"")).rstrip("/")
        """without user and password, for messages"""
        self._prefix = str(address).rstrip("/")
        self.concurrency = concurrency
        self.limits: RequestLimits | None = None
        """None until the service was asked for them"""
        self._model = model
        self._request_timeout = request_timeout
        self._retries = retries
        for name, value in (headers or {}).items():
            _check_header(name, value)
        names = {name.lower() for name in headers or ()}
        defaults = {"user-agent": "qualms-client", "accept": "application/json"}
        if api_key is not None:
            if not _API_KEY.fullmatch(api_key):  # the message must not contain it
                raise ParameterError(
                    "The api_key is not accepted; accepted: printable ASCII characters without spaces."
                )
            defaults["authorization"] = f"Bearer {api_key}"
        self._headers = [
            *((name, value) for name, value in defaults.items() if name not in names),
            *(headers or {}).items(),
        ]

    def call(self, model: str | None, timeout: float | None, parameters: Mapping[str, Any]) -> Call:
        """A call of `predict` with this timeout, whose clock starts now, and these query parameters; None is left out."""
        if timeout is not None and not timeout > 0:
            raise ParameterError(f"timeout is {timeout!r}; accepted: seconds, more than 0, or None.")
        name = model or self._model
        path = "/predict" if name is None else f"/models/{quote(name, safe='')}/predict"
        given = {key: value for key, value in parameters.items() if value is not None}
        query = urlencode(
            {key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}
        )
        seconds = math.inf if timeout is None else timeout
        return Call(_url(f"{self._prefix}{path}{'?' if query else ''}{query}"), time.monotonic() + seconds, seconds)

    def attempts(self, call: Call) -> Attempts:
        """The attempts of one request of a call, whose clock starts now."""
        budget, deadline = self._request_timeout, time.monotonic() + self._request_timeout
        if call.deadline < deadline:
            budget, deadline = call.seconds, call.deadline
        return Attempts(deadline, budget, self._retries, time.monotonic)

    def predict_request(self, call: Call, content_type: str, body: bytes, seconds: float) -> httpx.Request:
        """A request that has `seconds` for its reply."""
        maximum = (self.limits or RequestLimits()).max_request_timeout_seconds
        header = {"content-type": content_type, "x-request-timeout": f"{max(0.001, min(seconds, maximum)):.3f}"}
        return self._request("POST", call.url, seconds, header, body)

    def limits_request(self, seconds: float) -> httpx.Request:
        """A request for the service's limits."""
        return self._request("GET", _url(f"{self._prefix}/models"), seconds, {}, b"")

    def _request(
        self, method: Literal["GET", "POST"], url: httpx.URL, seconds: float, headers: dict[str, str], body: bytes
    ) -> httpx.Request:
        """All requests are made here, with all their headers."""
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
        fields = [*self._headers, *headers.items()]
        return httpx.Request(method, url, headers=fields, content=body or None, extensions={"timeout": timeouts})

    def read_limits(self, response: httpx.Response, body: bytes) -> RequestLimits:
        """The limits in a reply; the usual ones if it has none, because an earlier service or a proxy sent it."""
        try:
            check_status(response, body)
            self.limits = _Published.model_validate_json(body, extra="ignore").limits
        except ProblemError as error:
            if error.status in (408, 429, 502, 503):
                raise
            self.limits = RequestLimits()
        except ValidationError:
            self.limits = RequestLimits()
        return self.limits

    def read_results(self, response: httpx.Response, body: bytes, chunk: Chunk) -> list[Result]:
        """The results in a reply. Unknown fields are ignored, because the service may be newer than the client."""
        try:
            check_status(response, body)
        except ProblemError as error:
            error.locate(chunk.first, len(chunk.files))
            raise
        try:
            results = PredictReply.model_validate_json(body, extra="ignore").results
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "the body"
            raise ReplyError(f"The reply of {self.base} is not a prediction: {where}: {problem['msg']}.") from error
        if len(results) != len(chunk.files):
            raise ReplyError(f"{self.base} replied with {len(results):,} results to {len(chunk.files):,} images.")
        return results

    def split(self, chunk: Chunk, error: ClientError) -> tuple[Chunk, Chunk]:
        """Two smaller requests if those may succeed where this one was refused; raises the error otherwise."""
        refused = isinstance(error, ProblemError) and (
            error.status == 413 or (error.status == 422 and error.problem.field == "X-Request-Timeout")
        )
        if not refused or len(chunk.files) == 1 or error.image is not None:
            raise error
        self.limits = None  # they have changed, or a proxy has smaller ones
        return chunk.halves()

    def too_large(self, size: int) -> None:
        """Raise ReplyError if a reply of this size is larger than any of the service."""
        if size > MAX_REPLY_BYTES:
            raise ReplyError(f"The reply of {self.base} has more than {MAX_REPLY_BYTES:,} bytes.")


def check_status(response: httpx.Response, body: bytes) -> None:
    """Raise ProblemError unless the status is 200."""
    if response.status_code == httpx.codes.OK:
        return
    try:
        problem = ProblemReply.model_validate_json(body)
    except ValidationError:
        title = response.reason_phrase or f"Status {response.status_code}"
        detail = f"{title}, without a problem document."
        problem = ProblemReply(type="about:blank", title=title, status=response.status_code, detail=detail)
    raise ProblemError(problem, retry_after(response.headers.get("retry-after"), utc_now()))


@lru_cache(maxsize=64)
def _url(text: str) -> httpx.URL:
    """Parsing a URL takes as long as sending a small request."""
    return httpx.URL(text)


def _base_url(text: str) -> httpx.URL:
    """The URL to which paths are added; ParameterError if none can be."""
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError) as error:
        raise ParameterError(f"The URL is {text!r}; it is not valid: {first_line(error)}.") from None
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        shown = str(url.copy_with(userinfo=b"")) if url.userinfo else text
        raise ParameterError(
            f"The URL is {shown!r}; accepted: one that begins with http:// or https://, and has a host and neither ? nor #."
        )
    if url.port is not None and url.port > _MAX_PORT:
        raise ParameterError(f"The port of the URL is {url.port}; accepted: 1 to {_MAX_PORT}.")
    return url.copy_with(query=None, fragment=None)


def _check_header(name: Any, value: Any) -> None:
    """ParameterError if httpx would not send the header, or if the client does; without its value, which may be secret."""
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise ParameterError(f"headers has the name {name!r}; accepted: letters, digits and any of !#$%&'*+-.^_`|~.")
    if name.lower() in _OWN_HEADERS:
        raise ParameterError(f"headers has {name!r}, which the client sends itself.")
    if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
        raise ParameterError(f"The value of {name!r} in headers is not accepted; accepted: printable ASCII characters.")
