"""Both clients against a real process of the service, and against a scripted server for what ours does not do."""

import asyncio
import json
import pickle
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from pydantic import BaseModel
from tests.qualms.client.conftest import Scripted

import qualms
import qualms.client.errors
from qualms.access.keys import Key
from qualms.access.keys_file import add_key
from qualms.bundle.file import Bundle
from qualms.client.images import Images
from qualms.client.protocol import MAX_CONNECTIONS
from qualms.replies import ProblemReply

Process: TypeAlias = tuple[subprocess.Popen[str], str]
Start: TypeAlias = Callable[..., Process]
Predict: TypeAlias = Callable[..., Any]
"""(url, images, options of the client and of predict) → what `predict` returns"""
_CLIENT_OPTIONS = {"api_key", "headers", "request_timeout", "retries", "concurrency", "verify", "transport"}


def predict_sync(url: str, images: Images, **options: Any) -> Any:
    own = {name: options.pop(name) for name in _CLIENT_OPTIONS & set(options)}
    with qualms.Client(url, **own) as client:
        return client.predict(images, **options)


def predict_async(url: str, images: Images, **options: Any) -> Any:
    own = {name: options.pop(name) for name in _CLIENT_OPTIONS & set(options)}

    async def run() -> Any:
        async with qualms.AsyncClient(url, **own) as client:
            return await client.predict(images, **options)

    return asyncio.run(run())


both = pytest.mark.parametrize("predict", [predict_sync, predict_async])


@pytest.fixture(scope="module")
def in_process(bundle: Bundle) -> qualms.Model:
    return qualms.open_model(bundle.path)


def same(served: Any, expected: Any) -> bool:
    """Whether results are equal; numbers in JSON have the digits of float32."""
    if isinstance(expected, list):
        return len(served) == len(expected) and all(same(*pair) for pair in zip(served, expected, strict=True))
    if isinstance(expected, dict):
        return served.keys() == expected.keys() and all(same(served[name], expected[name]) for name in expected)
    if isinstance(expected, BaseModel):
        return same(served.model_dump(), expected.model_dump())
    return bool(served == pytest.approx(expected, rel=1e-4) if isinstance(expected, float) else served == expected)


def reply(images: int, result: qualms.Result, **extra: Any) -> bytes:
    document = {
        "model": {"name": "other", "version": "1", "digest": "0" * 64},
        "request_id": "r",
        "results": [{**result.model_dump(mode="json", exclude_none=True), **extra}] * images,
    }
    return json.dumps(document).encode()


def count(body: bytes) -> int:
    return max(1, body.count(b'name="images"'))


def processed(url: str) -> int:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(float(next(line.split()[1] for line in text.splitlines() if line.startswith("qualms_batch_size_sum"))))


@both
@pytest.mark.slow
def test_results_equal_those_of_the_model_in_process(
    predict: Predict, service_process: Start, in_process: qualms.Model, digits: list[bytes], digit_file: Path
) -> None:
    _, url = service_process(max_images=7)
    assert same(predict(url, digits), in_process.predict(list(digits)))
    assert same(predict(url, digit_file), in_process.predict(digit_file))
    assert predict(url, []) == []
    options = {"target_fpr": 0.2, "guarantee": "marginal", "coverage": 0.9, "explain": True, "alpha": "top10"}
    expected = in_process.predict(digits[0], **options)  # type: ignore[call-overload]
    assert same(predict(url, digits[0], **options), expected)


@both
@pytest.mark.slow
def test_errors_carry_the_problem_document_and_the_number_of_the_image(
    predict: Predict, service_process: Start, in_process: qualms.Model, digits: list[bytes]
) -> None:
    _, url = service_process(max_images=4)
    with pytest.raises(qualms.ProblemError) as caught:
        predict(url, [*digits[:9], b"no image", *digits[:9]], headers={"X-Request-ID": "mine"})
    error = caught.value
    assert (error.status, error.title, error.request_id) == (
        415,
        "The content is not an accepted image or type",
        "mine",
    )
    assert error.type == "/problems/unsupported"
    assert "not an image" in error.detail
    assert error.image == 9
    with pytest.raises(qualms.ProblemError, match="target_fpr is '2'"):
        predict(url, digits[0], target_fpr=2)
    with pytest.raises(qualms.ProblemError) as caught:
        predict(url, digits[0], model="other")
    assert caught.value.status == 404
    name = in_process.bundle.manifest.name
    assert same(predict(url, digits[0], model=name), in_process.predict(digits[0]))


@both
@pytest.mark.slow
def test_a_429_storm_ends_with_every_result(
    predict: Predict, service_process: Start, in_process: qualms.Model, digits: list[bytes]
) -> None:
    """Uploads above the memory of all bodies are refused with 429; each client returns until it gets its result."""
    _, url = service_process(max_upload_bytes=140_000, max_body_bytes=140_000)
    large = [file + bytes(120_000) for file in digits[:8]]  # Pillow ignores what follows the image
    expected = in_process.predict(list(large))
    with ThreadPoolExecutor(len(large)) as pool:
        results = list(pool.map(lambda file: predict(url, file, request_timeout=60.0), 3 * large))
    assert same(results, 3 * expected)
    assert refused(url) > 0


def refused(url: str) -> int:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(
        int(float(line.split()[1])) for line in text.splitlines() if re.match(r'qualms_requests_total.*"429"', line)
    )


@both
def test_retry_after_is_honoured_as_seconds_and_as_a_date(
    predict: Predict, scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    times: list[float] = []
    result = in_process.predict(digits[0])

    def answer(path: str, _: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path == "/models":
            return 404, {}, b""
        times.append(time.monotonic())
        if len(times) == 1:
            return 429, {"retry-after": "1"}, b""
        if len(times) == 2:
            return 503, {"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, b""
        return 200, {}, reply(count(body), result)

    scripted.answer = answer
    assert predict(scripted.url, digits[0]) == result
    assert len(times) == 3
    assert times[1] - times[0] >= 1.0


@both
def test_a_retry_after_beyond_the_deadline_is_not_waited_for(
    predict: Predict, scripted: Scripted, digits: list[bytes]
) -> None:
    scripted.answer = lambda *_: (429, {"retry-after": "3600"}, b"")
    with pytest.raises(qualms.ProblemError) as caught:
        predict(scripted.url, digits[0], timeout=5.0)
    assert (caught.value.status, caught.value.retry_after) == (429, 3600.0)
    assert len(scripted.requests) == 1


@both
def test_the_remaining_time_is_sent_and_shrinks_with_each_attempt(
    predict: Predict, scripted: Scripted, digits: list[bytes]
) -> None:
    scripted.answer = lambda path, *_: (404 if path == "/models" else 503, {}, b"")
    with pytest.raises((qualms.ProblemError, qualms.DeadlineError)):
        predict(scripted.url, digits[0], timeout=0.6)
    sent = [float(headers["x-request-timeout"]) for path, headers, _ in scripted.requests if path == "/predict"]
    assert len(sent) >= 2
    assert sent[0] <= 0.6
    assert all(later < earlier for earlier, later in zip(sent, sent[1:], strict=False))


@both
def test_a_reply_that_trickles_does_not_outlive_the_deadline(
    predict: Predict, trickle: str, digits: list[bytes]
) -> None:
    with pytest.raises(qualms.DeadlineError) as caught:
        predict(trickle, digits[0], timeout=0.3)
    assert isinstance(caught.value, TimeoutError)


@both
@pytest.mark.slow
def test_a_deadline_that_the_service_cannot_meet_is_an_error_in_time(
    predict: Predict, service_process: Start, digits: list[bytes]
) -> None:
    _, url = service_process()
    endless = (digits[index % len(digits)] for index in range(10**9))
    started = time.monotonic()
    with pytest.raises((qualms.DeadlineError, qualms.ProblemError)):
        predict(url, endless, timeout=1.0)
    assert time.monotonic() - started < 10


@both
@pytest.mark.slow
def test_a_restart_in_the_middle_loses_no_result(
    predict: Predict,
    service_process: Start,
    in_process: qualms.Model,
    digits: list[bytes],
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    process, url = service_process(port=port, drain_seconds=0, max_images=4)
    halfway, restarted = threading.Event(), threading.Event()

    def images() -> Iterator[bytes]:
        for index in range(400):
            if index == 200:
                halfway.set()
                assert restarted.wait(60)
            yield digits[index % len(digits)]

    def restart() -> None:
        halfway.wait(60)
        process.terminate()
        restarted.set()
        process.wait(30)
        service_process(port=port, drain_seconds=0, max_images=4, ready=False)

    thread = threading.Thread(target=restart)
    thread.start()
    results = predict(url, images(), request_timeout=60.0)
    thread.join()
    expected = in_process.predict(list(digits))
    assert same(results, [expected[index % len(digits)] for index in range(400)])


@both
@pytest.mark.slow
def test_ten_thousand_images_in_one_call_keep_their_order_and_are_not_all_read_first(
    predict: Predict, service_process: Start, in_process: qualms.Model, digits: list[bytes], tmp_path: Path
) -> None:
    process, url = service_process()
    paths = []
    for index, file in enumerate(digits):
        paths.append(tmp_path / f"{index}.png")
        paths[-1].write_bytes(file)
    read, served = 0, []

    def images() -> Iterator[Path]:
        nonlocal read
        for index in range(10_000):
            read += 1
            if read % 2000 == 0:
                served.append((read, processed(url)))
            yield paths[index * 7 % len(paths)]

    results = predict(url, images(), alpha="none", concurrency=4)
    expected = [result.prediction for result in in_process.predict(list(digits))]
    predictions = [result.prediction for result in results]
    assert same(predictions, [expected[index * 7 % len(paths)] for index in range(10_000)])
    assert all(so_far - done <= 64 * 6 for so_far, done in served)
    assert process.poll() is None


@pytest.mark.slow
def test_a_cancelled_task_ends_its_requests_and_leaves_the_client_usable(
    service_process: Start, in_process: qualms.Model, digits: list[bytes]
) -> None:
    _, url = service_process()

    async def run() -> Any:
        async with qualms.AsyncClient(url) as client:
            expected = await client.predict(digits[0])
            before = len(asyncio.all_tasks())
            endless = (digits[index % len(digits)] for index in range(10**9))
            task = asyncio.create_task(client.predict(endless))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == before
            assert await client.predict(digits[0]) == expected
            served = -1
            async with asyncio.timeout(10):  # queued requests are finished, and no others follow
                while served != (served := processed(url)):
                    await asyncio.sleep(0.3)
            return expected

    assert same(asyncio.run(run()), in_process.predict(digits[0]))


def connections(url: str) -> int:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(float(next(line.split()[1] for line in text.splitlines() if line.startswith("qualms_connections "))))


@both
def test_unknown_fields_of_a_newer_service_are_ignored(
    predict: Predict, scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    result = in_process.predict(digits[0])
    limits = {"models": [], "limits": {"max_images": 3, "max_colours": 7}, "news": 1}

    def answer(path: str, _: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, json.dumps(limits).encode() if path == "/models" else reply(count(body), result, novel={"a": 1})

    scripted.answer = answer
    assert predict(scripted.url, digits[:7]) == [result] * 7
    assert sorted(count(body) for path, _, body in scripted.requests if path == "/predict") == [1, 3, 3]


@both
def test_a_request_that_a_proxy_finds_too_large_is_split(
    predict: Predict, scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    result = in_process.predict(digits[0])

    def answer(path: str, _: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path == "/models":
            return 404, {}, b""
        return (413, {}, b"<html>") if count(body) > 3 else (200, {}, reply(count(body), result))

    scripted.answer = answer
    assert predict(scripted.url, digits[:10]) == [result] * 10


@both
def test_the_named_model_headers_and_a_path_prefix_are_sent(
    predict: Predict, scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    scripted.answer = lambda path, *_: (
        200,
        {},
        b"{}" if path.endswith("/models") else reply(1, in_process.predict(digits[0])),
    )
    predict(scripted.url + "/a/", digits[0], model="x/y", headers={"Authorization": "Bearer 1", "User-Agent": "me"})
    (_, first, _), (path, headers, body) = scripted.requests
    assert path == "/a/models/x%2Fy/predict"
    assert body == digits[0]
    assert (first["authorization"], headers["authorization"], headers["user-agent"]) == ("Bearer 1", "Bearer 1", "me")


@both
@pytest.mark.parametrize("body", [b"", b"[]", b'{"results": []}'])
def test_a_reply_that_is_no_prediction_is_a_reply_error(
    predict: Predict, scripted: Scripted, digits: list[bytes], body: bytes
) -> None:
    scripted.answer = lambda *_: (200, {}, body)
    with pytest.raises(qualms.ReplyError, match="is not a prediction"):
        predict(scripted.url, digits[0])


@both
def test_a_reply_with_too_few_results_is_a_reply_error(
    predict: Predict, scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    scripted.answer = lambda path, *_: (
        200,
        {},
        b"{}" if path == "/models" else reply(1, in_process.predict(digits[0])),
    )
    with pytest.raises(qualms.ReplyError, match="1 results to 2 images"):
        predict(scripted.url, digits[:2])


@both
def test_an_absent_service_is_unreachable_and_a_connection_error(
    predict: Predict, free_port: Callable[[], int], digits: list[bytes]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(qualms.UnreachableError, match=f"no connection to {url}") as caught:
        predict(url, digits[0], retries=1)
    assert isinstance(caught.value, ConnectionError)


def test_the_transport_is_passed_through(in_process: qualms.Model, digits: list[bytes]) -> None:
    result = in_process.predict(digits[0])

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b"{}" if request.method == "GET" else reply(1, result))

    for predict in (predict_sync, predict_async):
        assert predict("https://nowhere.invalid", digits[0], transport=httpx.MockTransport(handle)) == result


@pytest.mark.slow
def test_connections_are_reused_and_threads_may_share_a_client(service_process: Start, digits: list[bytes]) -> None:
    _, url = service_process()
    with qualms.Client(url) as client:
        for _ in range(20):
            client.predict(digits[0])
        assert connections(url) <= 2  # the client's, and that of this request
        results: list[list[str]] = []
        threads = [
            threading.Thread(target=lambda: results.append([one.prediction.label for one in client.predict(digits)]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 8
        assert all(one == results[0] for one in results)


@pytest.mark.slow
def test_more_tasks_than_connections_share_them(service_process: Start, digits: list[bytes]) -> None:
    _, url = service_process()

    async def run() -> list[qualms.Result]:
        async with qualms.AsyncClient(url, request_timeout=60) as client:
            results = await asyncio.gather(*(client.predict(digits[0]) for _ in range(250)))
            assert connections(url) <= MAX_CONNECTIONS + 1
            return results

    results = asyncio.run(run())
    assert len(results) == 250


def test_the_synchronous_client_works_inside_a_running_event_loop(
    scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    scripted.answer = lambda path, *_: (
        200,
        {},
        b"{}" if path == "/models" else reply(1, in_process.predict(digits[0])),
    )

    async def run() -> Any:
        return predict_sync(scripted.url, digits[0])

    assert asyncio.run(run()) == in_process.predict(digits[0])


def test_a_stream_that_is_closed_early_reads_no_further(
    scripted: Scripted, in_process: qualms.Model, digits: list[bytes]
) -> None:
    result = in_process.predict(digits[0])
    scripted.answer = lambda path, _, body: (200, {}, b"{}" if path == "/models" else reply(count(body), result))
    read = []

    def images() -> Iterator[bytes]:
        for index in range(10**6):
            read.append(index)
            yield digits[0]

    with qualms.Client(scripted.url, concurrency=2) as client:
        results = client.stream(images())
        assert next(results) == result
        results.close()  # type: ignore[attr-defined]
    assert len(read) <= 64 * 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"url": "service:8000"},
            "The URL is 'service:8000'; accepted: one that begins with http:// or https://, and has a host and neither ? nor #.",
        ),
        (
            {"url": "http://u:secret@h/?a"},
            "The URL is 'http://h/?a'; accepted: one that begins with http:// or https://, and has a host and neither ? nor #.",
        ),
        (
            {"url": "http://"},
            "The URL is 'http://'; accepted: one that begins with http:// or https://, and has a host and neither ? nor #.",
        ),
        ({"url": "http://[::1"}, "The URL is 'http://[::1'; it is not valid: Invalid port: ':1'."),
        (
            {"url": None},
            "The URL is None; it is not valid: Invalid type for url.  Expected str or httpx.URL, got <class 'NoneType'>: None.",
        ),
        ({"url": "http://h:65536"}, "The port of the URL is 65536; accepted: 1 to 65535."),
        (
            {"headers": {"x y": "1"}},
            "headers has the name 'x y'; accepted: letters, digits and any of !#$%&'*+-.^_`|~.",
        ),
        (
            {"headers": {"x": "a\r\nb: c"}},
            "The value of 'x' in headers is not accepted; accepted: printable ASCII characters.",
        ),
        ({"headers": {"x": "é"}}, "The value of 'x' in headers is not accepted; accepted: printable ASCII characters."),
        ({"headers": {"Content-Length": "3"}}, "headers has 'Content-Length', which the client sends itself."),
        ({"request_timeout": 0}, "request_timeout is 0; accepted: seconds, more than 0."),
        ({"retries": -1}, "retries is -1; accepted: None, 0 or more."),
        ({"concurrency": 0}, "concurrency is 0; accepted: 1 to 100."),
    ],
)
def test_options_that_are_not_accepted_are_named(options: dict[str, Any], sentence: str) -> None:
    for kind in (qualms.Client, qualms.AsyncClient):
        with pytest.raises(qualms.QualmsError) as caught:
            kind(**options)
        assert str(caught.value) == sentence


def test_messages_have_no_password_of_the_url(free_port: Callable[[], int]) -> None:
    client = qualms.Client(f"http://user:secret@127.0.0.1:{free_port()}", retries=0)
    with pytest.raises(qualms.UnreachableError) as caught:
        client.predict(b"image")
    assert "secret" not in f"{caught.value} {client!r}"


@both
def test_the_proxy_of_the_environment_is_used(
    predict: Predict, scripted: Scripted, digits: list[bytes], in_process: qualms.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", scripted.url)
    result = in_process.predict(digits[0])
    scripted.answer = lambda path, *_: (200, {}, b"{}" if path.endswith("/models") else reply(1, result))
    assert predict("http://service.invalid", digits[0]) == result
    assert [path for path, *_ in scripted.requests] == [
        "http://service.invalid/models",
        "http://service.invalid/predict",
    ]


@pytest.mark.parametrize(
    "error",
    [
        qualms.ProblemError(ProblemReply(type="t", title="title", status=429, detail="Detail."), 3.0),
        qualms.DeadlineError("late", qualms.UnreachableError("no")),
        qualms.UnreachableError("no"),
    ],
)
def test_errors_survive_pickling(error: qualms.ClientError) -> None:
    error.image = 5
    copy = pickle.loads(pickle.dumps(error))  # our own bytes
    assert type(copy) is type(error)
    assert (str(copy), repr(vars(copy))) == (str(error), repr(vars(error)))


@both
@pytest.mark.slow
def test_a_key_is_sent_and_one_for_predictions_alone_is_enough(
    predict: Predict, service_process: Start, tmp_path: Path, encode: Callable[..., bytes], draw_images: Any
) -> None:
    token = add_key(tmp_path / "keys", lambda digest: Key("app", digest, only=("predict",)))
    _, url = service_process(keys_file=tmp_path / "keys")
    image = encode(draw_images(0, 1)[0])
    assert predict(url, [image] * 3, api_key=token)[0].prediction.label
    with pytest.raises(qualms.client.errors.ProblemError, match="needs an API key") as error:
        predict(url, image)
    assert error.value.status == 401
