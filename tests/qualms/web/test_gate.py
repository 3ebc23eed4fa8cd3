"""Every route with no key, a wrong, a right, a revoked one, one with other uses, and one over its limit, at both entrances."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from qualms.access.keys import METRICS, PREDICT, READ, Key, new_token
from qualms.access.keys_file import add_key, remove_key
from qualms.bundle.file import Bundle
from qualms.settings import Settings
from qualms.web.app import Application, create_app
from qualms.web.gate import scope_of

Until = Callable[[Callable[[], bool]], None]
ROUTES = [
    # method, path, what a key must allow (None: public), status with a right key
    ("POST", "/predict", PREDICT, 200),
    ("GET", "/predict", PREDICT, 405),
    ("OPTIONS", "/predict", PREDICT, 405),
    ("POST", "/models/{name}/predict", PREDICT, 200),
    ("POST", "/models/unknown/predict", PREDICT, 404),
    ("GET", "/models", READ, 200),
    ("HEAD", "/models", READ, 200),
    ("GET", "/models/{name}", READ, 200),
    ("GET", "/models/{name}/calibration", READ, 200),
    ("GET", "/status", READ, 200),
    ("GET", "/docs", READ, 200),
    ("GET", "/docs/assets/swagger-ui.css", READ, 200),
    ("GET", "/openapi.json", READ, 200),
    ("GET", "/metrics", METRICS, 200),
    ("DELETE", "/models", READ, 405),
    ("GET", "/unknown", READ, 404),
    ("GET", "/PREDICT", READ, 404),
    ("GET", "//metrics", READ, 404),
    ("GET", "/page/..%2fmodels", READ, 404),
    ("GET", "/", None, 200),
    ("HEAD", "/", None, 200),
    ("GET", "/page/app.js", None, 200),
    ("GET", "/page/unknown", None, 404),
    ("GET", "/livez", None, 200),
    ("GET", "/readyz", None, 200),
    ("GET", "/healthz", None, 200),
    ("POST", "/livez", None, 405),
]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def tokens(keys_file: Path) -> dict[str, str]:
    """Tokens by name; `revoked` is in the file until a test removes it."""
    options: dict[str, dict[str, Any]] = {
        "right": {},
        "revoked": {},
        **{f"only-{scope}": {"only": (scope,)} for scope in (PREDICT, READ, METRICS)},
        **{f"limited-{number}": {"rate": 1e-4} for number in range(len(ROUTES))},
    }

    def add(name: str, values: dict[str, Any]) -> str:
        return add_key(keys_file, lambda digest: Key(name, digest, **values))

    return {name: add(name, values) for name, values in options.items()} | {"wrong": new_token()}


@pytest.fixture(params=["our server", "another server"])
def service(
    request: pytest.FixtureRequest,
    keys_file: Path,
    tokens: dict[str, str],
    service_process: Callable[..., tuple[Any, str]],
    start_service: Callable[..., httpx.Client],
) -> Iterator[httpx.Client]:
    if request.param == "our server":
        _, url = service_process(keys_file=keys_file)
        with httpx.Client(base_url=url, trust_env=False) as client:
            yield client
    else:
        yield start_service(keys_file=str(keys_file))


@pytest.fixture
def send(
    service: httpx.Client, bundle: Bundle, encode: Callable[..., bytes], draw_images: Callable[..., NDArray[np.uint8]]
) -> Callable[..., httpx.Response]:
    image = encode(draw_images(0, 1)[0])

    def send_one(method: str, path: str, token: str | None = None, *, api_key: bool = False) -> httpx.Response:
        headers = {"content-type": "image/png"} if method == "POST" else {}
        if token is not None:
            headers |= {"x-api-key": token} if api_key else {"authorization": f"Bearer {token}"}
        path = path.replace("{name}", bundle.manifest.name)
        body = image if method == "POST" else None
        url = service.base_url.copy_with(raw_path=path.encode())  # as it is written here
        return service.send(service.build_request(method, url, headers=headers, content=body))

    return send_one


def check_problem(response: httpx.Response, method: str, status: int) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-request-id"]
    if method != "HEAD":
        assert response.json()["status"] == status
    if status == 401:
        assert response.headers["www-authenticate"].startswith('Bearer realm="qualms"')
    if status == 429:
        assert 1 <= int(response.headers["retry-after"]) <= 10_000


def test_every_route_with_every_kind_of_key(
    send: Callable[..., httpx.Response], tokens: dict[str, str], keys_file: Path, until: Until
) -> None:
    assert send("GET", "/models", tokens["revoked"]).status_code == 200
    remove_key(keys_file, "revoked")
    until(lambda: send("GET", "/models", tokens["revoked"]).status_code == 401)
    for number, (method, path, scope, status) in enumerate(ROUTES):
        limited = tokens[f"limited-{number}"]
        if scope is None:
            for token in (None, tokens["wrong"], tokens["right"], tokens["revoked"], limited, limited):
                assert send(method, path, token).status_code == status, (method, path)
            continue
        for token in (None, "x" * 600, tokens["wrong"], tokens["revoked"]):
            check_problem(send(method, path, token), method, 401)
        check_problem(send(method, path, "", api_key=True), method, 401)
        assert send(method, path, tokens["right"]).status_code == status, (method, path)
        assert send(method, path, tokens["right"], api_key=True).status_code == status, (method, path)
        for other in (PREDICT, READ, METRICS):
            if other == scope:
                assert send(method, path, tokens[f"only-{other}"]).status_code == status, (method, path)
            else:
                check_problem(send(method, path, tokens[f"only-{other}"]), method, 403)
        assert send(method, path, limited).status_code == status, (method, path)
        check_problem(send(method, path, limited), method, 429)


PATTERNS = {"/page/app.js": "/page/{name}", "/docs/assets/swagger-ui.css": "/docs/assets"}
"""rows of ROUTES that stand for several paths, and the routes that they reach"""


@pytest.fixture
def app(bundle: Bundle, keys_file: Path, tokens: dict[str, str]) -> Iterator[Application]:
    """The application with keys, without a server; its model is not loaded."""
    settings = Settings(model=str(bundle.path), keys_file=str(keys_file), decode_threads=1)
    made = create_app(settings, registry=CollectorRegistry())
    yield made
    made.close()


def test_the_table_has_every_method_of_every_route_of_the_application(app: Application) -> None:
    """A route that is added needs a row: its scope follows from its path alone, so another method may need another scope."""
    listed = {(method, PATTERNS.get(path, path)) for method, path, _, status in ROUTES if status == 200}
    listed |= {("HEAD", path) for method, path in listed if method == "GET"}
    routes = [(getattr(route, "path", ""), getattr(route, "methods", None) or {"GET"}) for route in app.routes]
    assert {(method, path) for path, methods in routes for method in methods} <= listed
    described = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    assert ("POST", "/predict") in described, "predictions are not among the routes of the framework"
    assert described <= listed


def test_the_key_of_a_request_is_not_that_of_the_next_one(app: Application, tokens: dict[str, str]) -> None:
    """Some servers give all requests of a connection the same state."""
    state: dict[str, Any] = {}

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": state}, receive, send)

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://service") as client:
            keys: list[dict[str, str]] = [{}, {"x-api-key": tokens["right"]}, {}, {"x-api-key": tokens["only-metrics"]}]
            return [(await client.get("/models", headers=headers)).status_code for headers in keys]

    assert asyncio.run(statuses()) == [401, 200, 401, 403]
    assert state == {}


def test_a_path_needs_the_same_key_under_a_prefix_of_another_server(app: Application, tokens: dict[str, str]) -> None:
    async def status(method: str, path: str, key: str) -> int:
        transport = httpx.ASGITransport(app, root_path="/vision")
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return (await client.request(method, path, headers={"x-api-key": tokens[key]})).status_code

    for method, path, scope, expected in (
        ("GET", "/vision/metrics", METRICS, 200),
        ("GET", "/vision/models", READ, 200),
        ("POST", "/vision/predict", PREDICT, 503),  # the model is not loaded
        ("GET", "/vision/livez", None, 200),
        ("GET", "/visionary/metrics", READ, 404),
    ):
        for other in (PREDICT, READ, METRICS):
            found = asyncio.run(status(method, path, f"only-{other}"))
            assert found == (expected if scope in (None, other) else 403), (path, other)


def test_a_new_route_needs_a_key() -> None:
    assert scope_of("/anything") is not None
    assert scope_of("*") is not None
    assert scope_of("") is not None
    assert scope_of("/page/../models") is not None
    assert scope_of("/page/") is None


def test_a_bearer_is_recognised_in_any_case_and_other_schemes_are_not(
    service: httpx.Client, tokens: dict[str, str]
) -> None:
    def status(value: str) -> int:
        return service.get("/models", headers={"authorization": value}).status_code

    assert status(f"bEARER {tokens['right']}") == 200
    assert status(f"Bearer  {tokens['right']}") == 200
    for value in (
        tokens["right"],
        f"Basic {tokens['right']}",
        f"Bearer {tokens['right']} x",
        f"Bearer{tokens['right']}",
    ):
        assert status(value) == 401


def test_x_api_key_takes_precedence_because_authorization_may_be_a_proxys(
    service: httpx.Client, tokens: dict[str, str]
) -> None:
    right, wrong = tokens["right"], tokens["wrong"]
    accepted = service.get("/models", headers={"x-api-key": right, "authorization": f"Bearer {wrong}"})
    refused = service.get("/models", headers={"x-api-key": wrong, "authorization": f"Bearer {right}"})
    assert (accepted.status_code, refused.status_code) == (200, 401)


def test_a_key_is_counted_by_its_name_until_it_is_removed(
    send: Callable[..., httpx.Response], tokens: dict[str, str], keys_file: Path, until: Until
) -> None:
    def series() -> dict[str, float]:
        text = send("GET", "/metrics", tokens["only-metrics"]).text
        lines = [line for line in text.splitlines() if line.startswith("qualms_key_requests_total{")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def name(key: str, code: int) -> str:
        return f'qualms_key_requests_total{{code="{code}",key="{key}"}}'

    before = series()
    assert [before[name("right", code)] for code in (200, 403, 429)] == [0, 0, 0]
    send("POST", "/predict", tokens["right"])
    send("GET", "/models", tokens["right"])
    send("GET", "/unknown", tokens["right"])
    send("GET", "/models", tokens["only-predict"])
    until(lambda: series()[name("right", 200)] == 2)
    after = series()
    assert (after[name("right", 404)], after[name("only-predict", 403)]) == (1, 1)
    remove_key(keys_file, "right")
    until(lambda: name("right", 200) not in series())
    assert name("only-predict", 403) in series()


def test_a_broken_file_keeps_the_old_keys(
    send: Callable[..., httpx.Response], tokens: dict[str, str], keys_file: Path, until: Until
) -> None:
    def reloads(accepted: str) -> str:
        text = send("GET", "/metrics", tokens["right"]).text
        return next(line for line in text.splitlines() if f'accepted="{accepted}",content="keys"' in line)

    content = keys_file.read_text()
    keys_file.write_text("what is this\n")
    until(lambda: reloads("false").endswith(" 1.0"))
    assert send("GET", "/models", tokens["right"]).status_code == 200
    keys_file.write_text(content.replace("right", "renamed"))
    until(lambda: reloads("true").endswith(" 1.0"))
    assert send("GET", "/models", tokens["right"]).status_code == 200


def exchange(url: str, data: bytes) -> tuple[bytes, int]:
    """The reply to raw bytes, and how many bytes of a body of 16 MB the server reads before it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        reply = b""
        while chunk := connection.recv(65536):
            reply += chunk
    return reply, len(reply)


def test_a_request_without_a_key_is_answered_before_its_body(
    service_process: Callable[..., tuple[Any, str]], keys_file: Path, tokens: dict[str, str]
) -> None:
    _, url = service_process(keys_file=keys_file)
    for extra in ("", "Expect: 100-continue\r\n"):
        head = (
            f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 16000000\r\n{extra}\r\n"
        )
        reply, _ = exchange(url, head.encode())
        assert reply.startswith(b"HTTP/1.1 401 ")
        assert b"100 Continue" not in reply
        assert b"connection: close" in reply


def test_a_refused_head_request_has_no_body_and_keeps_the_connection(
    service_process: Callable[..., tuple[Any, str]], keys_file: Path, tokens: dict[str, str]
) -> None:
    _, url = service_process(keys_file=keys_file)
    requests = b"HEAD /models HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    reply, _ = exchange(url, requests)
    refused, _, rest = reply.partition(b"\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 401 ")
    assert rest.startswith(b"HTTP/1.1 200 ")


def test_simultaneous_requests_of_a_key_are_limited(
    service_process: Callable[..., tuple[Any, str]], keys_file: Path, until: Until
) -> None:
    token = add_key(keys_file, lambda digest: Key("two", digest, concurrency=2))
    _, url = service_process(keys_file=keys_file)
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nX-API-Key: {token}\r\nContent-Type: image/png\r\n"
    slow = [socket.create_connection((host, int(port)), timeout=30) for _ in range(2)]
    headers = {"x-api-key": token}
    with httpx.Client(base_url=url, trust_env=False, headers=headers) as client:
        for connection in slow:
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
        until(lambda: client.get("/models").status_code == 429)
        response = client.get("/models")
        check_problem(response, "GET", 429)
        assert "2 requests at a time" in response.json()["detail"]
        slow.pop().close()
        until(lambda: client.get("/models").status_code == 200)
        slow.pop().close()


def test_logs_have_the_name_of_the_key_and_the_address_behind_a_listed_proxy(
    service_process: Callable[..., tuple[Any, str]],
    keys_file: Path,
    tokens: dict[str, str],
    tmp_path: Path,
    until: Until,
) -> None:
    _, url = service_process(keys_file=keys_file, trusted_proxies="127.0.0.1")
    headers = {"x-request-id": "mine", "x-forwarded-for": "192.0.2.7", "x-api-key": tokens["right"]}
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/models", headers=headers).headers["x-request-id"] == "mine"
        client.post("/predict", headers={**headers, "x-request-id": "second"}, content=b"x")
        client.get("/models", headers={**headers, "x-request-id": "third", "x-api-key": tokens["wrong"]})

    def lines() -> dict[str, dict[str, Any]]:
        parsed = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
        return {line["request_id"]: line for line in parsed if "request_id" in line}

    until(lambda: {"mine", "second", "third"} <= set(lines()))
    found = lines()
    assert [found[name]["client"] for name in ("mine", "second", "third")] == ["192.0.2.7"] * 3
    assert [found[name].get("key") for name in ("mine", "second", "third")] == ["right", "right", None]
