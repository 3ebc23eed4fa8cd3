"""Files are decoded in processes that are limited, killed and replaced, and that hold nothing of the service."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.errors import ImageError
from qualms.images.estimates import estimate
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess_with_pillow
from qualms.images.worker_pool import DeadlinePassed, KilledFor, NoWorkerError, WorkerPool
from qualms.images.worker_process import NO_WORKER, cpu_seconds

SPEC = InputSpec(height=12, width=10)
TIMEOUT = 60.0
NEGATIVE_PIXELS = -round((cpu_seconds(0) - 0.01) / (cpu_seconds(10**6) - cpu_seconds(0)) * 10**6)
"""leaves a hundredth of a second of CPU time"""


class Pool(WorkerPool):
    """A pool that records why its workers were killed."""

    def __init__(self, size: int = 1, *, idle_priority: bool = True) -> None:
        self.killed: list[KilledFor] = []
        super().__init__(size, idle_priority=idle_priority, on_killed=self.killed.append)

    def decode(
        self, data: bytes, spec: InputSpec = SPEC, *, memory: int = 2**28, seconds: float = TIMEOUT, pixels: int = 2**24
    ) -> NDArray[np.uint8]:
        return self.preprocess(
            data,
            spec,
            max_pixels=2**24,
            max_side=2**14,
            max_memory=memory,
            deadline=time.monotonic() + seconds,
            pixels=pixels,
        )

    @property
    def processes(self) -> list[int]:
        """The process that forks the workers, and the workers."""
        assert self._template is not None
        template = self._template.pid
        children = Path(f"/proc/{template}/task/{template}/children").read_text().split()
        return [template, *map(int, children)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    corners = np.random.default_rng(0).integers(0, 256, (4, 4, 4), np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def slow_file() -> bytes:
    """A file of a few kilobytes that takes tenths of a second of CPU time."""
    return encode(Image.new("RGB", (4000, 4000)), "WEBP", lossless=True, quality=0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize(
    "spec",
    [SPEC, InputSpec(height=9, width=9, colour="L"), InputSpec(height=8, width=8, fit="crop", shorter_side=12)],
)
def test_the_pixels_are_those_of_pillow(pool: Pool, kind: str, spec: InputSpec) -> None:
    data = encode(picture(), kind)
    assert np.array_equal(pool.decode(data, spec), preprocess_with_pillow(data, spec))


def test_large_inputs_and_large_files_fit_through_the_shared_memory(pool: Pool) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1200, 1300, 3), np.uint8))
    data, spec = encode(noise, "PNG", compress_level=0), InputSpec(height=1000, width=1000)
    assert len(data) > 4_000_000
    assert np.array_equal(pool.decode(data, spec), preprocess_with_pillow(data, spec))
    assert np.array_equal(pool.decode(encode(picture(), "GIF")), preprocess_with_pillow(encode(picture(), "GIF"), SPEC))


def test_errors_are_those_of_pillow(pool: Pool) -> None:
    for data in (b"hello", encode(picture(), "WEBP")[:50], encode(picture(), "PNG")[:-30], b""):
        with pytest.raises(ImageError) as expected:
            preprocess_with_pillow(data, SPEC)
        with pytest.raises(ImageError) as actual:
            pool.decode(data)
        assert (str(actual.value), actual.value.reason) == (str(expected.value), expected.value.reason)
    assert pool.killed == []


def test_a_file_that_takes_too_much_cpu_time_ends_its_worker_alone(pool: Pool) -> None:
    pool.decode(encode(picture(), "GIF"))
    before = pool.processes
    with pytest.raises(ImageError, match="takes more CPU time to decode than its size allows") as caught:
        pool.decode(slow_file(), pixels=NEGATIVE_PIXELS)
    assert (caught.value.reason, pool.killed) == ("failed", ["cpu"])
    pool.decode(encode(picture(), "GIF"))
    assert pool.processes[0] == before[0], "only the worker is replaced"
    assert pool.processes[1:] != before[1:]


def test_a_file_that_takes_too_much_memory_is_refused(pool: Pool) -> None:
    with pytest.raises(ImageError):
        pool.decode(slow_file(), memory=30 * 2**20)
    assert pool.decode(slow_file(), memory=400 * 2**20).shape == SPEC.shape


@pytest.mark.parametrize("size", [(1500, 1000), (300, 4000)])
def test_the_estimated_memory_is_enough(pool: Pool, size: tuple[int, int]) -> None:
    for kind, mode, options in (
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "I;16", {}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
        ("WEBP", "RGBA", {"method": 0}),
        ("WEBP", "RGB", {"lossless": True, "method": 0, "quality": 0}),
        ("BMP", "RGB", {}),
        ("GIF", "P", {"transparency": 2}),
        ("TIFF", "RGBA", {"compression": "tiff_lzw"}),
        ("TIFF", "CMYK", {"compression": "tiff_adobe_deflate"}),
        ("TIFF", "F", {"compression": "tiff_lzw"}),
        ("TIFF", "RGB", {"compression": "jpeg"}),
    ):
        image = picture(*size, "L" if mode in ("F", "I;16") else mode)
        if mode == "F":
            image = Image.fromarray(np.asarray(image, np.float32) / 256)
        elif mode == "I;16":
            image = Image.fromarray(np.asarray(image, np.uint16) * 256)
        data = encode(image, kind, **options)
        needed = estimate(data, None, SPEC, 2**24)
        assert needed.pixels == size[0] * size[1]
        assert pool.decode(data, memory=needed.memory, pixels=needed.pixels).shape == SPEC.shape, (kind, mode)


def test_a_deadline_that_passes_ends_the_worker(pool: Pool) -> None:
    pool.decode(encode(picture(), "GIF"))
    with pytest.raises(DeadlinePassed):
        pool.decode(slow_file(), seconds=0.005)
    assert pool.killed == ["deadline"]
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape


def test_a_file_whose_worker_was_killed_by_the_system_gets_another_one(pool: Pool) -> None:
    pool.decode(encode(picture(), "GIF"))
    os.kill(pool.processes[1], signal.SIGKILL)
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape
    assert pool.killed == ["crash"]


def test_a_crash_of_the_decoder_is_an_error_of_its_file_alone(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = WorkerPool._exchange

    def crash(self: WorkerPool, worker: Any, *arguments: Any) -> Any:
        os.kill(worker.pid, signal.SIGSEGV)
        return exchange(self, worker, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(WorkerPool, "_exchange", crash)
        with pytest.raises(ImageError, match="its decoder crashed") as caught:
            pool.decode(encode(picture(), "GIF"))
    assert (caught.value.reason, pool.killed) == ("failed", ["crash", "crash"])
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape


def test_the_template_is_replaced_if_it_ends(pool: Pool) -> None:
    pool.decode(encode(picture(), "GIF"))
    template, worker = pool.processes
    os.kill(template, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape
    assert pool.processes[0] != template


def test_a_template_that_does_not_reply_is_replaced(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.decode(encode(picture(), "GIF"))
    template, worker = pool.processes
    assert pool._control is not None
    pool._control.settimeout(0.05)
    os.kill(template, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape
    assert pool.processes[0] != template


def test_without_more_processes_no_file_is_called_damaged(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pool, "_command", lambda *_: str(NO_WORKER).encode())  # the reply if fork fails
        with pytest.raises(NoWorkerError):
            pool.decode(encode(picture(), "GIF"))
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape


def test_a_process_that_forks_no_workers_in_time_is_no_worker(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reply(*_: object) -> bytes:
        raise TimeoutError("timed out")

    with monkeypatch.context() as patched:
        patched.setattr(pool, "_command", no_reply)
        with pytest.raises(NoWorkerError):
            pool.decode(encode(picture(), "GIF"))
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape


@pytest.mark.parametrize("idle_priority", [True, False])
def test_workers_have_the_priority_that_was_asked_for(idle_priority: bool) -> None:
    inherited = os.sched_getscheduler(0)
    pool = Pool(idle_priority=idle_priority)
    try:
        pool.decode(encode(picture(), "GIF"))
        template, worker = pool.processes
        assert os.sched_getscheduler(template) == inherited
        assert os.sched_getscheduler(worker) == (os.SCHED_IDLE if idle_priority else inherited)
    finally:
        pool.close()


def test_files_wait_for_a_worker_until_their_deadline(pool: Pool) -> None:
    assert pool._free.acquire()
    with pytest.raises(DeadlinePassed):
        pool.decode(encode(picture(), "GIF"), seconds=0.001)
    pool._free.release()
    assert pool.decode(encode(picture(), "GIF")).shape == SPEC.shape


def test_files_are_decoded_side_by_side() -> None:
    pool = Pool(2)
    data, results = encode(picture(), "WEBP"), list[NDArray[np.uint8]]()
    threads = [threading.Thread(target=lambda: results.append(pool.decode(data))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(results) == 8
    assert all(np.array_equal(pixels, results[0]) for pixels in results)
    assert len(pool.processes) <= 3
    pool.close()


def test_processes_hold_no_environment_no_other_files_and_no_large_libraries(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUALMS_SECRET", "do not leak")
    pool.decode(encode(picture(), "GIF"))
    for pid in pool.processes:
        assert b"QUALMS_SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
        files = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert files.count("/dev/null") == 3
        assert sum(file.startswith("socket:") for file in files) == 1
        assert len(files) <= 5
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "onnxruntime" not in maps
        assert "numpy" not in maps
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        assert pss < 25_000, "kB"


def test_closing_ends_all_processes_and_may_be_repeated() -> None:
    pool = Pool()
    pool.decode(encode(picture(), "GIF"))
    processes = pool.processes
    pool.close()
    pool.close()
    for pid in processes:
        assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()
    with pytest.raises(DeadlinePassed):
        pool.decode(encode(picture(), "GIF"))


def test_a_worker_is_replaced_after_many_files(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualms.images.worker_pool._MAX_FILES", 3)
    data, seen = encode(picture(), "GIF"), set[int]()
    for _ in range(7):
        pool.decode(data)
        seen.update(pool.processes[1:])
    assert pool.killed == []
    assert len(seen) == 3


def test_a_machine_that_is_too_slow_to_start_a_worker_is_an_error_for_the_user() -> None:
    pool = WorkerPool(1, start_seconds=0.001)
    deadline = time.monotonic() + TIMEOUT
    limits: dict[str, Any] = {"max_pixels": 100, "max_side": 100, "max_memory": 2**20, "deadline": deadline}
    try:
        with pytest.raises(NoWorkerError, match="No process can be started"):
            pool.preprocess(b"", SPEC, **limits)
    finally:
        pool.close()
