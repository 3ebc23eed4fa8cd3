"""Files are decoded where they cost nobody else time, within one budget of memory, and until their deadline at most."""

import asyncio
import gc
import io
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import ImageInput, preprocess_with_pillow
from qualms.inference.batch import ClientDisconnected, Expired
from qualms.inference.decode_memory import MemoryBudget
from qualms.inference.decode_queue import Decoded, InvalidImage, Place, Plan
from qualms.inference.decoding import INLINE_PIXELS, Decoder, Limits, NotInline

SPEC = InputSpec(height=12, width=10)
LIMITS = Limits(pixels=2**22, side=5000, memory=2**29)
TIMEOUT = 60.0


def encode(image: NDArray[np.uint8], kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def play(scene: Callable[[Decoder], Awaitable[None]], limits: Limits = LIMITS, **options: Any) -> None:
    async def whole() -> None:
        decoder = Decoder(1, limits, **options)
        try:
            await scene(decoder)
        finally:
            await asyncio.to_thread(decoder.close)

    asyncio.run(whole())


async def decode(
    decoder: Decoder, plan: Plan, *, seconds: float = TIMEOUT, disconnected: Callable[[], bool] = lambda: False
) -> Decoded:
    done: asyncio.Future[Decoded | BaseException] = asyncio.get_running_loop().create_future()
    decoder.decode(plan, SPEC, time.monotonic() + seconds, disconnected, done.set_result)
    result = await asyncio.wait_for(done, TIMEOUT)
    if isinstance(result, BaseException):
        raise result
    return result


def test_small_plain_files_are_decoded_inline_others_in_threads_and_workers() -> None:
    async def scene(decoder: Decoder) -> None:
        cases: list[tuple[list[ImageInput], Place]] = [
            ([encode(noise(20, 30))], Place.INLINE),
            ([noise(20, 30)], Place.INLINE),
            ([encode(noise(20, 30))] * 4, Place.INLINE),
            ([encode(noise(20, 30, 3), "JPEG")], Place.INLINE),
            ([encode(np.zeros((97, 96), np.uint8))], Place.THREAD),
            ([encode(np.zeros((96, 96), np.uint8))] * 3, Place.THREAD),
            ([encode(noise(2, 2))] * 9, Place.THREAD),
            ([encode(noise(70, 70, 3))], Place.THREAD),
            ([encode(noise(640, 480, 3), "JPEG")], Place.THREAD),
            ([noise(200, 200, 3)], Place.THREAD),
            ([encode(noise(20, 30), "GIF")], Place.WORKER),
            ([encode(noise(300, 300))], Place.WORKER),
            ([b"hello"], Place.WORKER),
        ]
        for inputs, place in cases:
            assert decoder.plan(inputs, SPEC).places == [place] * len(inputs)
            assert (decoder.wait(decoder.plan(inputs, SPEC)) is None) == (place is Place.INLINE)

    play(scene)


@pytest.mark.parametrize(
    "files",
    [
        [encode(noise(640, 480, 3), "JPEG")],
        [encode(noise(640, 480, 3), "JPEG", progressive=True), encode(noise(9, 9))],
        [encode(noise(20, 30), "GIF")],
        [encode(noise(9, 9)), encode(noise(20, 30, 3), "WEBP"), encode(noise(640, 480, 3), "JPEG")],
    ],
)
def test_every_place_gives_the_same_pixels(files: list[bytes]) -> None:
    async def scene(decoder: Decoder) -> None:
        plan = decoder.plan(list(files), SPEC)
        for chosen in (plan, decoder.in_workers(plan, SPEC)):
            decoded = await decode(decoder, chosen)
            for data, image in zip(files, decoded.images, strict=True):
                assert np.array_equal(image, preprocess_with_pillow(data, SPEC))
            assert [encoding.format for encoding in decoded.encodings] == [
                str(Image.open(io.BytesIO(data)).format).lower() for data in files
            ]
        assert (decoder.rows, decoder.requests) == (0, 0)

    play(scene)


def test_inline_files_that_the_fast_decoder_refuses_are_left_to_workers() -> None:
    data = encode(noise(20, 30, 3), "JPEG")
    damaged = data[: data.index(b"\xff\xda") + 40] + b"\xff\xd9"

    async def scene(decoder: Decoder) -> None:
        plan = decoder.plan([damaged], SPEC)
        assert plan.is_inline
        with pytest.raises(NotInline):
            decoder.decode_inline(plan, SPEC)
        decoded = await decode(decoder, decoder.in_workers(plan, SPEC))
        assert np.array_equal(decoded.images[0], preprocess_with_pillow(damaged, SPEC)), "Pillow accepts it"

    play(scene)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (encode(np.zeros((5001, 2), np.uint8), "JPEG"), "too_large"),
        (encode(np.zeros((2100, 2100), np.uint8), "JPEG"), "too_large"),
        (encode(np.zeros((2, 5001), np.uint8)), "too_large"),
        (encode(np.zeros((2, 5001), np.uint8), "GIF"), "too_large"),
        (np.zeros((2, 5001), np.uint8), "too_large"),
        (b"hello", "unsupported"),
        (encode(noise(9, 9), "GIF")[:9], "malformed"),
    ],
)
def test_an_invalid_image_is_named_by_its_index(image: bytes | NDArray[np.uint8], reason: str) -> None:
    async def scene(decoder: Decoder) -> None:
        with pytest.raises(InvalidImage) as caught:
            await decode(decoder, decoder.plan([encode(noise(640, 480, 3), "JPEG"), image], SPEC))
        assert (caught.value.index, caught.value.error.reason) == (1, reason)

    play(scene)


def test_images_that_need_more_memory_than_the_whole_budget_are_refused() -> None:
    async def scene(decoder: Decoder) -> None:
        for data in (encode(noise(1900, 2000, 3), "JPEG", progressive=True), encode(noise(1900, 2000), "GIF")):
            with pytest.raises(InvalidImage) as caught:
                await decode(decoder, decoder.plan([data], SPEC))
            assert "MB to be decoded" in str(caught.value.error)
            assert caught.value.error.reason == "too_large"
        assert (await decode(decoder, decoder.plan([encode(noise(200, 200), "GIF")], SPEC))).images

    play(scene, Limits(pixels=2**22, side=5000, memory=24 * 2**20))


class Held:
    """Holds the decoding of every image until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        decode_one = Decoder._decode_one
        self.order: list[tuple[object, int]] = []

        def held(decoder: Decoder, request: Any, index: int, *arguments: Any, **options: Any) -> Any:
            self.order.append((request.spec, index))
            assert self.released.wait(TIMEOUT)
            return decode_one(decoder, request, index, *arguments, **options)

        monkeypatch.setattr(Decoder, "_decode_one", held)


def test_a_deadline_that_passes_is_reported_at_once_though_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def scene(decoder: Decoder) -> None:
        with pytest.raises(Expired):
            await decode(decoder, decoder.plan([encode(noise(640, 480, 3), "JPEG")], SPEC), seconds=0.01)
        assert (decoder.rows, decoder.requests) == (0, 0)
        held.released.set()

    play(scene)


def test_requests_that_expired_or_disconnected_in_the_queue_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def scene(decoder: Decoder) -> None:
        plan = decoder.plan([encode(noise(640, 480, 3), "JPEG")], SPEC)
        broken = plan._replace(inputs=[b"would be refused"])
        first = asyncio.ensure_future(decode(decoder, plan))
        gone = asyncio.ensure_future(decode(decoder, broken, disconnected=lambda: True))
        late = asyncio.ensure_future(decode(decoder, broken, seconds=0.001))
        with pytest.raises(Expired):
            await late
        held.released.set()
        assert (await first).images
        with pytest.raises(ClientDisconnected):
            await gone

    play(scene)


def test_the_predicted_wait_grows_with_the_queue_and_shrinks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def scene(decoder: Decoder) -> None:
        photo = decoder.plan([encode(noise(640, 480, 3), "JPEG")], SPEC)
        alone = decoder.wait(photo)
        assert alone is not None
        assert alone > 0, "the first burst is not admitted without limit"
        waiting = [asyncio.ensure_future(decode(decoder, photo)) for _ in range(3)]
        await asyncio.sleep(0)
        assert decoder.wait(photo) == pytest.approx(4 * alone)
        assert decoder.wait(decoder.plan([encode(noise(9, 9), "GIF")], SPEC)) != pytest.approx(4 * alone)
        assert (decoder.rows, decoder.requests) == (3, 3)
        held.released.set()
        await asyncio.gather(*waiting)
        assert (decoder.rows, decoder.requests) == (0, 0)
        while decoder._queues[Place.THREAD]._running:
            await asyncio.sleep(0.001)
        assert decoder.wait(photo) == alone

    play(scene)


def test_a_larger_photo_is_predicted_to_take_longer() -> None:
    async def scene(decoder: Decoder) -> None:
        waits = [
            decoder.wait(decoder.plan([encode(np.zeros((side, side, 3), np.uint8), "JPEG")], SPEC))
            for side in (200, 400, 1600)
        ]
        assert waits == sorted(waits, key=lambda wait: wait or 0.0)
        assert waits[2] > 10 * waits[0]  # type: ignore[operator]

    play(scene)


def test_killed_workers_are_reported() -> None:
    killed = list[str]()

    async def scene(decoder: Decoder) -> None:
        data = encode(np.zeros((1500, 1500, 3), np.uint8), "WEBP", lossless=True, quality=0)
        await decode(decoder, decoder.plan([encode(noise(9, 9), "GIF")], SPEC))
        for _ in range(100):  # on a busy machine the deadline may pass before the worker has begun
            with suppress(Expired):
                await decode(decoder, decoder.plan([data], SPEC), seconds=0.01)
            await asyncio.sleep(0.01)
            if killed:
                break
        assert set(killed) == {"deadline"}

    play(scene, on_killed=killed.append)


def test_images_that_are_enlarged_much_are_not_decoded_on_the_event_loop() -> None:
    async def scene(decoder: Decoder) -> None:
        large = InputSpec(height=224, width=224, fit="crop", shorter_side=256)
        for image in (encode(noise(24, 96)), encode(noise(1, 1)), noise(3, 90)):
            assert decoder.plan([image], SPEC).is_inline
            assert not decoder.plan([image], large).is_inline
            assert not decoder.plan([image], InputSpec(height=224, width=224)).is_inline

    play(scene)


def test_images_of_one_request_go_to_threads_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(decoder: Decoder) -> None:
        plan = decoder.plan([encode(noise(20, 30)), encode(noise(20, 30), "WEBP"), noise(20, 30)], SPEC)
        assert plan.places == [Place.THREAD, Place.WORKER, Place.THREAD]
        assert len((await decode(decoder, plan)).images) == 3

    play(scene)


def test_a_file_that_the_fast_decoder_refuses_in_a_thread_goes_on_in_a_worker() -> None:
    data = encode(noise(640, 480, 3), "JPEG")
    damaged = data[: data.index(b"\xff\xda") + 4000] + b"\xff\xd9"

    async def scene(decoder: Decoder) -> None:
        plan = decoder.plan([damaged], SPEC)
        assert plan.places == [Place.THREAD]
        decoded = await decode(decoder, plan)
        assert np.array_equal(decoded.images[0], preprocess_with_pillow(damaged, SPEC))

    play(scene)


def test_requests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    specs = {name: SPEC.model_copy(update={"width": width}) for name, width in (("many", 10), ("one", 11))}

    async def scene(decoder: Decoder) -> None:
        photo = encode(noise(200, 200, 3), "JPEG")
        waiting = []
        for name, count in (("many", 5), ("one", 1)):
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            plan = decoder.plan([photo] * count, specs[name])
            decoder.decode(plan, specs[name], time.monotonic() + TIMEOUT, lambda: False, done.set_result)
            waiting.append(done)
        held.released.set()
        await asyncio.gather(*waiting)
        order = [index if spec == specs["many"] else "one" for spec, index in held.order]
        assert order.index("one") <= 2
        assert [index for index in order if index != "one"] == [0, 1, 2, 3, 4]

    play(scene)


def test_a_request_that_expired_in_the_queue_does_not_hold_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def scene(decoder: Decoder) -> None:
        photo = encode(noise(640, 480, 3), "JPEG")
        first = asyncio.ensure_future(decode(decoder, decoder.plan([photo], SPEC)))
        await asyncio.sleep(0)
        body = noise(640, 480, 3)
        freed = weakref.ref(body)
        inputs: list[ImageInput] = [body]
        with pytest.raises(Expired):
            await decode(decoder, decoder.plan(inputs, SPEC), seconds=0.001)
        inputs.clear()
        del body
        gc.collect()
        assert freed() is None
        held.released.set()
        await first

    play(scene)


def test_slow_files_do_not_change_the_prediction_for_an_idle_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(decoder: Decoder) -> None:
        photo = decoder.plan([encode(noise(640, 480, 3), "JPEG")], SPEC)
        alone = decoder.wait(photo)
        decode_plain = Decoder._decode_plain

        def slow(*arguments: Any) -> Any:
            time.sleep(0.02)
            return decode_plain(*arguments)

        monkeypatch.setattr(Decoder, "_decode_plain", slow)
        for _ in range(10):
            await decode(decoder, decoder.plan([encode(noise(100, 101))], SPEC))
        while decoder._queues[Place.THREAD]._running:
            await asyncio.sleep(0.001)
        assert decoder.wait(photo) == alone

    play(scene)


def test_failing_files_count_in_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(decoder: Decoder) -> None:
        queue = decoder._queues[Place.WORKER]
        before = queue._actual / queue._estimated
        data = encode(np.zeros((1500, 1500, 3), np.uint8), "WEBP", lossless=True, quality=0)
        for _ in range(5):
            with pytest.raises(InvalidImage):
                await decode(decoder, decoder.plan([data[:-9]], SPEC))
        while queue._running:
            await asyncio.sleep(0.001)
        assert queue._actual / queue._estimated != before

    play(scene)


# Memory


def test_a_share_of_memory_waits_until_it_is_free() -> None:
    budget, order = MemoryBudget(100), list[str]()
    holding, waiting = threading.Event(), threading.Event()

    def second() -> None:
        holding.wait(TIMEOUT)
        waiting.set()
        with budget.share(60, time.monotonic() + TIMEOUT, worker=False):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with budget.share(60, time.monotonic() + TIMEOUT, worker=False):
        holding.set()
        assert waiting.wait(TIMEOUT)
        order.append("first")
    thread.join(TIMEOUT)
    assert order == ["first", "second"]


def test_workers_leave_a_quarter_of_the_memory_to_plain_files() -> None:
    budget, now = MemoryBudget(100), time.monotonic()
    with budget.share(75, now, worker=True):
        with pytest.raises(Expired), budget.share(1, now, worker=True):
            pass
        with budget.share(25, now, worker=False), pytest.raises(Expired), budget.share(1, now, worker=False):
            pass
    with budget.share(75, now, worker=True), budget.share(25, now, worker=False):
        pass


def test_a_large_share_is_not_passed_over() -> None:
    budget, order = MemoryBudget(100), list[int]()
    first = budget.share(60, time.monotonic() + TIMEOUT, worker=False)
    first.__enter__()

    def take(size: int) -> None:
        with budget.share(size, time.monotonic() + TIMEOUT, worker=False):
            order.append(size)

    threads = []
    for size in (80, 10):
        threads.append(threading.Thread(target=take, args=(size,)))
        threads[-1].start()
        while len(budget._waiting[False]) < len(threads):
            time.sleep(0.001)
    first.__exit__(None, None, None)
    for thread in threads:
        thread.join(TIMEOUT)
    assert order == [80, 10]


def test_inline_pixels_are_the_limit_of_one_image() -> None:
    async def scene(decoder: Decoder) -> None:
        side = int(INLINE_PIXELS**0.5)
        assert decoder.plan([np.zeros((side, side), np.uint8)], SPEC).is_inline
        assert not decoder.plan([np.zeros((side + 1, side), np.uint8)], SPEC).is_inline

    play(scene)
