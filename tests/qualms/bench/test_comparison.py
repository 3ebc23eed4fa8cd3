import asyncio
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from PIL import Image, JpegImagePlugin
from rich.console import Console
from typer.testing import CliRunner

from qualms import cli
from qualms.bench import comparison
from qualms.bench.comparison import compare
from qualms.bench.load.closed_loop import (
    BuiltInClient,
    LoadResult,
    Wrk,
    default_generator,
    median,
    parse_wrk,
    run_closed_loop,
    send_requests,
)
from qualms.bench.load.connection import post_requests
from qualms.bench.load.photographs import PhotoKind, draw_photographs
from qualms.bench.load.sample_images import draw_colour_pngs, draw_pngs, sample_files
from qualms.bench.machine_limit import Limit, LimitMeter
from qualms.bench.servers import plain_server
from qualms.bench.servers.process_tree import RequestMemory
from qualms.bench.servers.processes import HOST, BenchError, Cores, choose_cores, free_port, pinned, server
from qualms.bench.tables import ComparisonRow, ServerLoad, print_comparison, print_costs, print_memory
from qualms.bundle.file import open_bundle
from qualms.decisions.verdicts import Decider
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess
from qualms.inference.batch import Answer, Batch
from qualms.inference.engine import Engine
from qualms.web.reply import DEFAULT_QUERY, ReplyWriter

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes can be pinned on Linux only")

WRK_GOOD = """\
Running 1s test @ http://127.0.0.1:8000/predict
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     4.11ms    1.02ms  11.20ms   78.93%
    Req/Sec     1.94k   118.09     2.11k    70.00%
  1941 requests in 1.01s, 1.93MB read
Requests/sec:   1922.52
Transfer/sec:      1.91MB
{"requests": 1941, "refused": 0, "broken": 0, "microseconds": 1009613, "p50": 4034, "p99": 7215}
"""
WRK_ERRORS = """\
Running 2s test @ http://127.0.0.1:8000/predict
  1 threads and 64 connections
  500 requests in 2.00s, 340.90KB read
  Socket errors: connect 0, read 3, write 1, timeout 2
  Non-2xx or 3xx responses: 100
{"requests": 500, "refused": 100, "broken": 6, "microseconds": 2000000, "p50": 1000, "p99": 2000}
"""


class Stub(ThreadingHTTPServer):
    """A server that records request bodies and returns the given statuses in rotation."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, statuses: list[int], models: Any = ()) -> None:
        super().__init__((HOST, 0), StubHandler)
        self.statuses = statuses
        self.models = orjson.dumps({"models": models})
        self.bodies: list[bytes] = []
        self.types: list[str] = []

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the load generators abort connections when their time is over."""


class StubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_POST(self) -> None:
        self.server.types.append(self.headers["content-type"])
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.statuses[(len(self.server.bodies) - 1) % len(self.server.statuses)]
        self._reply(status, b"" if status == 200 else b"no")

    def do_GET(self) -> None:
        self._reply(200, self.server.models)

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Server-Timing", "queue;dur=1.5, decode;dur=0.250")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    """Starts stub servers."""
    started: list[Stub] = []

    def start(*arguments: Any) -> Stub:
        started.append(Stub(*arguments))
        threading.Thread(target=started[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return started[-1]

    yield start
    for running in started:
        running.shutdown()
        running.server_close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All processes that the benchmark starts."""
    processes: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return processes


def string_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Whole runs


def test_a_run_measures_limit_service_and_plain_server_and_ends_its_processes(
    bundle_file: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "find_perf", lambda: None)
    console = string_console()
    rows = compare(
        str(bundle_file),
        seconds=0.3,
        rounds=1,
        concurrencies=(4, 1),
        pictures="photo-224",
        profile=True,
        generator=BuiltInClient(),
        console=console,
    )
    assert [row.concurrency for row in rows] == [1, 4]
    if sys.platform == "linux":
        assert all(row.plain and (row.ours.cpu or 0) > 0 and (row.plain.cpu or 0) > 0 for row in rows)
    assert all(row.limit and row.plain and row.ours.load.errors == row.plain.load.errors == 0 for row in rows)
    text = " ".join(text_of(console).split())
    for words in (
        "the built-in client: 16 JPEG files",
        "of the limit",
        "the plain server's",
        "images/run",
        "Time per reply",
        "CPU time per 1,000 requests",
        "Peak memory, one request at a time: qualms",
    ):
        assert words in text
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_a_running_service_is_measured_without_starting_another(
    bundle_file: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    options: dict[str, Any] = {"seconds": 0.2, "rounds": 1, "concurrencies": [2], "generator": BuiltInClient()}
    with server(lambda port: ["qualms", "serve", str(bundle_file), "--port", str(port)], ()) as service:
        (alone,) = compare(service.url, console=string_console(), **options)
        assert len(started) == 1
        (compared,) = compare(f"{service.url}/", bundle=str(bundle_file), console=string_console(), **options)
        assert len(started) == 2
    assert (alone.limit, alone.plain) == (None, None)
    if sys.platform == "linux":  # the process is found by its port
        assert (alone.ours.cpu or 0) > 0
    assert compared.limit
    assert compared.plain


@pytest.mark.parametrize(
    "interrupt",
    [lambda: signal.raise_signal(signal.SIGINT), lambda: signal.raise_signal(signal.SIGTERM), lambda: 1 / 0],
    ids=["Ctrl-C", "SIGTERM", "error"],
)
def test_servers_are_ended_after_an_interrupt_or_error(
    bundle_file: Path, started: list[subprocess.Popen[bytes]], interrupt: Callable[[], object]
) -> None:
    class Interrupted(BuiltInClient):
        def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> LoadResult:
            interrupt()
            return super().__call__(url, bodies, seconds, concurrency)

    before = signal.getsignal(signal.SIGTERM)
    inherited = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # shells start background jobs with SIGINT ignored
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit, ZeroDivisionError)):
            compare(str(bundle_file), seconds=0.1, concurrencies=[1], generator=Interrupted(), console=string_console())
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(comparison, "compare", lambda target, **options: given.update(options, target=target))
    arguments = ["bench", "mnist", "--seconds", "2", "--concurrency", "4", "--concurrency", "256", "--profile"]
    arguments += ["--pictures", "photo-640", "--instructions", "--cores", "2"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert given == {
        "target": "mnist",
        "bundle": None,
        "seconds": 2.0,
        "rounds": 3,
        "concurrencies": [4, 256],
        "pictures": "photo-640",
        "profile": True,
        "instructions": True,
        "cores": 2,
        "pid": None,
    }


# Targets that cannot be measured


@pytest.mark.parametrize("url", ["http://192.0.2.1:8000", "https://127.0.0.1:8000", "http://example.org", "http://"])
def test_urls_outside_the_loopback_interface_are_rejected(url: str) -> None:
    with pytest.raises(BenchError, match="loopback"):
        compare(url, console=string_console())


def test_a_url_without_a_qualms_service_is_an_error(stub: Callable[..., Stub]) -> None:
    with pytest.raises(BenchError, match="does not respond"):
        compare(f"http://127.0.0.1:{free_port()}", console=string_console())
    with pytest.raises(BenchError, match="is not a Qualms service"):
        compare(stub([200]).url, console=string_console())


def test_a_bundle_that_differs_from_the_served_one_is_rejected(bundle_file: Path, stub: Callable[..., Stub]) -> None:
    served = stub([200], [{"input": {"height": 6, "width": 5}, "digest": "f" * 64}])
    with pytest.raises(BenchError, match="serves the model with digest ffffffffffffffff…, but"):
        compare(served.url, bundle=str(bundle_file), console=string_console())


def test_the_bundle_option_needs_a_url(bundle_file: Path) -> None:
    with pytest.raises(BenchError, match="only together with the URL"):
        compare(str(bundle_file), bundle=str(bundle_file), console=string_console())
    with pytest.raises(BundleError, match=r"no file 'nothing\.onnx'"):
        compare("nothing.onnx", console=string_console())


def test_the_pid_option_needs_a_url(bundle_file: Path) -> None:
    with pytest.raises(BenchError, match="--pid 1 is accepted only together with the URL"):
        compare(str(bundle_file), pid=1, console=string_console())


def test_the_error_of_a_server_that_does_not_start_is_reported(started: list[subprocess.Popen[bytes]]) -> None:
    with (
        pytest.raises(BenchError, match=r"did not start: There is no file 'nothing\.onnx'"),
        server(lambda port: ["qualms", "serve", "nothing.onnx", "--port", str(port)], ()),
    ):
        pytest.fail("it started")
    assert started[0].returncode == 2


# The plain server and the limit


def test_the_plain_server_returns_the_same_replies_as_the_service(bundle_file: Path) -> None:
    bundle = open_bundle(bundle_file)
    app = plain_server.create_app(bundle)
    engine = Engine(bundle, threads=1, max_batch=1)
    writer = ReplyWriter(bundle, Decider(bundle.manifest), engine.outputs)

    async def post(file: bytes) -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://plain") as client:
            assert (await client.get("/readyz")).json()["status"] == "ready"
            return (await client.post("/predict", content=file)).json()

    for file in draw_pngs(bundle.manifest.input, 3):
        image = preprocess(file, bundle.manifest.input)
        batch = Batch(engine.run(image[None]), [(1, 0.0)], 0.0, image[None])
        ours = orjson.loads(writer.write(Answer(batch, 0, 1, 0.0), DEFAULT_QUERY, "x"))
        expected, actual = flatten(ours), flatten(asyncio.run(post(file)))
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert actual[name] == value or math.isclose(actual[name], value, rel_tol=1e-6), name


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a reply by their paths, without null members and the request's id, which may differ."""
    if isinstance(value, dict):
        parts = [flatten(part, f"{path}.{name}") for name, part in value.items() if name != "request_id"]
    elif isinstance(value, list):
        parts = [flatten(part, f"{path}.{index}") for index, part in enumerate(value)]
    else:
        return {} if value is None else {path: value}
    return {name: leaf for part in parts for name, leaf in part.items()}


def test_the_limit_is_measured_with_batches_up_to_max_batch(bundle_file: Path) -> None:
    bundle = open_bundle(bundle_file)
    meter = LimitMeter(bundle, draw_pngs(bundle.manifest.input, 3), max_batch=4)
    assert [meter.measure(concurrency, 0.01).batch for concurrency in (1, 4, 64)] == [1, 4, 4]
    limit = meter.measure(2, 0.01)
    assert min(limit.decode, limit.our_decode, limit.inference, limit.encode) > 0


# Load generators


def test_sample_images_are_different_reproducible_and_of_the_models_size() -> None:
    spec = InputSpec(height=28, width=20, colour="L")
    files = draw_pngs(spec)
    assert len(set(files)) == len(files)
    assert draw_pngs(spec) == files
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "L", (20, 28))


def test_colour_images_are_different_reproducible_and_of_the_size_of_small_photographs() -> None:
    files = sample_files("colour", InputSpec(height=28, width=28, colour="L"))
    assert len(set(files)) == len(files)
    assert draw_colour_pngs() == files
    for file in files:
        assert 2400 <= len(file) <= 2800
        with Image.open(io.BytesIO(file)) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (32, 32))


@pytest.mark.parametrize(
    ("pictures", "number", "size", "smallest", "largest"),
    [
        ("photo-224", 16, (224, 224), 10_000, 20_000),
        ("photo-640", 16, (640, 480), 60_000, 120_000),
        ("photo-12mp", 4, (4000, 3000), 3_000_000, 4_000_000),
    ],
)
def test_photographs_are_different_reproducible_and_of_typical_size(
    pictures: PhotoKind, number: int, size: tuple[int, int], smallest: int, largest: int
) -> None:
    files = sample_files(pictures, InputSpec(height=28, width=28, colour="L"))
    assert draw_photographs(pictures) == files
    assert len(set(files)) == len(files) == number
    for file in files:
        assert smallest <= len(file) <= largest
        with Image.open(io.BytesIO(file)) as image:
            assert isinstance(image, JpegImagePlugin.JpegImageFile)
            assert (image.mode, image.size) == ("RGB", size)
            assert JpegImagePlugin.get_sampling(image) == 2  # 4:2:0


def test_requests_state_the_media_type_of_each_file() -> None:
    png, jpeg = draw_colour_pngs(1)[0], draw_photographs("photo-224")[0]
    requests = post_requests(f"http://{HOST}:1/predict", [png, jpeg])
    for body, kind in ((png, b"image/png"), (jpeg, b"image/jpeg"), (png, b"image/png")):
        head, _, sent = next(requests).partition(b"\r\n\r\n")
        assert sent == body
        assert b"\r\nContent-Type: " + kind + b"\r\n" in head


def test_the_output_of_wrk_is_parsed() -> None:
    assert parse_wrk(WRK_GOOD) == LoadResult(1e6 * 1941 / 1009613, 0.004034, 0.007215, 0, 1941)
    assert parse_wrk(WRK_ERRORS) == LoadResult(200.0, 0.001, 0.002, 106, 400)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("unable to connect to 127.0.0.1:1 Connection refused\n", "wrk failed: unable to connect"),
        ("", "wrk failed: it printed nothing"),
        (WRK_ERRORS.replace('"refused": 100', '"refused": 500'), "None of the 500 replies to wrk was successful"),
    ],
)
def test_a_failure_of_wrk_is_reported(output: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_wrk(output)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk_sends_the_files_unchanged_and_counts_refusals(stub: Callable[..., Stub]) -> None:
    generator, bodies = default_generator(), [bytes(range(256)), b"\xff\xd8" + bytes(5_000_000)]
    assert isinstance(generator, Wrk)
    target = stub([200, 200, 503])
    load = generator(f"{target.url}/predict", bodies, 0.1, 2)
    assert load.requests_per_second > 0
    assert load.errors > 0
    assert set(target.bodies) == set(bodies)
    assert set(target.types) == {"image/png", "image/jpeg"}


def test_the_built_in_client_is_used_if_wrk_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert isinstance(default_generator(), BuiltInClient)


def test_the_built_in_client_sends_the_files_in_rotation_and_counts_refusals(stub: Callable[..., Stub]) -> None:
    target, bodies = stub([200, 200, 503]), [b"one", b"two", b"three"]
    replies = run_closed_loop(f"{target.url}/predict", bodies, 0.2, 1)
    sent = len(replies.latencies) + replies.errors
    assert target.bodies[:sent] == [bodies[index % 3] for index in range(sent)]
    assert len(replies.latencies) == pytest.approx(2 * replies.errors, abs=2)
    assert replies.timing(0) == {"queue": 0.0015, "decode": 0.00025}
    load = BuiltInClient()(f"{target.url}/predict", bodies, 0.2, 2)
    assert 0 < load.p50 <= load.p99


def test_the_built_in_client_fails_without_a_successful_reply(stub: Callable[..., Stub]) -> None:
    for url in (stub([500]).url, f"http://127.0.0.1:{free_port()}"):
        with pytest.raises(BenchError, match="no successful reply"):
            run_closed_loop(f"{url}/predict", [b"x"], 0.1, 2)


def test_a_fixed_number_of_requests_is_sent_and_failures_are_reported(stub: Callable[..., Stub]) -> None:
    target = stub([200])
    assert send_requests(f"{target.url}/predict", [b"one", b"two"], 21, 4) == 21
    assert sorted(target.bodies) == [b"one"] * 11 + [b"two"] * 10
    with pytest.raises(BenchError, match="returned 10 successful replies to 20 requests"):
        send_requests(f"{stub([200, 503]).url}/predict", [b"x"], 20, 1)


# Figures


def test_the_median_is_taken_per_figure_and_errors_and_replies_are_summed() -> None:
    loads = [LoadResult(10, 3, 9, 1, 5), LoadResult(30, 1, 7, 0, 6), LoadResult(20, 2, 8, 2, 7)]
    assert median(loads) == LoadResult(20, 2, 8, 3, 18)


def test_ratios_to_the_limit_and_to_the_plain_server() -> None:
    limit = Limit(1, decode=0.004, our_decode=0.001, inference=0.003, encode=0.001)
    assert limit.images_per_second == pytest.approx(125)
    assert limit.with_our_decoder == pytest.approx(200)
    ours = ServerLoad(LoadResult(100, 0.002, 0.003, 0, 9), 0.006)
    plain = ServerLoad(LoadResult(50, 0.004, 0.005, 0, 9), 0.012)
    row = ComparisonRow(1, ours, plain, limit)
    assert row.share_of_limit == pytest.approx(0.8)
    assert row.share_of_limit_with_our_decoder == pytest.approx(0.5)
    assert (row.throughput_ratio, row.latency_ratio, row.cpu_ratio) == (2, 0.5, 0.5)
    console = string_console()
    print_comparison([row], console)
    print_costs([row], console)
    text = text_of(console)
    assert "At concurrency 1: p50 is 0.50 of the plain server's." in text
    assert ["1", "4,000", "1,000", "0.25", "200", "0.50", "6", "12", "0.50"] in map(str.split, text.splitlines())
    assert max(map(len, text.splitlines())) <= 80


def test_figures_of_12_megapixels_fit_into_the_table() -> None:
    limit = Limit(1, decode=0.2238, our_decode=0.1171, inference=0.003, encode=0.001)
    load = ServerLoad(LoadResult(4.3, 0.23, 0.3, 0, 9), 0.25456)
    console = string_console()
    print_costs([ComparisonRow(64, load, load, limit)], console)
    cells = ["64", "223,800", "117,100", "0.52", "8.26", "0.52", "254.6", "254.6", "1.00"]
    assert cells in map(str.split, text_of(console).splitlines())


def test_cells_are_empty_if_the_process_is_unknown() -> None:
    row = ComparisonRow(1, ServerLoad(LoadResult(100, 0.002, 0.003, 0, 9), None), None, None)
    assert (row.cpu_ratio, row.share_of_limit_with_our_decoder) == (None, None)
    console = string_console()
    print_costs([row], console)
    print_memory({"qualms": None}, console)
    assert ["1"] in map(str.split, text_of(console).splitlines())
    assert "one request at a time: unknown." in text_of(console)
    print_memory({"qualms": RequestMemory(idle=100_000_000, rise=2_500_000), "plain": None}, console)
    assert "qualms 2.5 MB above the 100.0 MB of the idle server." in " ".join(text_of(console).split())


# Cores


@pytest.mark.parametrize(
    ("number", "available", "threads", "chosen"),
    [
        (1, [], 1, ((), ())),
        (1, [3], 1, ((3,), (3,))),
        (1, [2, 5], 1, ((2,), (5,))),
        (1, [0, 1, 2, 3], 2, ((0,), (2,))),
        (1, [0, 1], 2, ((0,), (1,))),
        (2, [0, 1], 1, ((0, 1), (0, 1))),
        (2, [0, 1, 2], 1, ((0, 1), (2,))),
        (2, [0, 1, 2, 3], 2, ((0, 2), (1,))),
        (2, [0, 1, 2, 3, 4, 5], 2, ((0, 2), (4,))),
        (3, [0, 1, 2, 3], 2, ((0, 2, 1), (3,))),
    ],
)
def test_server_and_load_share_a_core_only_if_there_is_no_other(
    number: int, available: list[int], threads: int, chosen: tuple[Cores, Cores]
) -> None:
    def siblings(core: int) -> set[int]:
        first = core // threads * threads
        return set(range(first, first + threads))

    assert choose_cores(number, available, siblings) == chosen


@pytest.mark.parametrize("available", [[], [0, 1]])
def test_more_cores_than_there_are_is_an_error(available: list[int]) -> None:
    with pytest.raises(
        BenchError, match=f"--cores is 3, but the server can be pinned to at most {len(available)} cores"
    ):
        choose_cores(3, available)


@linux
def test_a_process_started_while_pinned_runs_on_that_core() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with pinned((core,)):
        assert os.sched_getaffinity(0) == {core}
        program = "import os; print(os.sched_getaffinity(0))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == f"{{{core}}}\n"
    assert os.sched_getaffinity(0) == before
