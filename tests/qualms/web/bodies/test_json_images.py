"""JSON bodies parsed in slices: the same images and statuses as with orjson, for any size of slice."""

import base64
import json
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from qualms.images.preprocess import ImageInput
from qualms.web.bodies.json_images import SLICE_BYTES, parse_json
from qualms.web.bodies.limits import Limits
from qualms.web.problems import Problem

LIMITS = Limits(body_bytes=2**24, images=4, json_depth=16)
WHOLE = 2**30
SLICES = (1, 2, 5, 16, 64)


def as_json(*images: object) -> bytes:
    return json.dumps({"images": images}).encode()


def plain(images: list[ImageInput]) -> list[Any]:
    return [image if isinstance(image, bytes) else image.tolist() for image in images]


def outcome(body: bytes, slice_bytes: int, limits: Limits = LIMITS) -> object:
    """The images, or status and field of the problem."""
    try:
        return plain(parse_json(body, limits, slice_bytes))
    except Problem as problem:
        return problem.status, problem.field


def refusal(body: bytes, slice_bytes: int, limits: Limits = LIMITS) -> Problem:
    with pytest.raises(Problem) as caught:
        parse_json(body, limits, slice_bytes)
    return caught.value


def is_json(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


# Oracle: orjson and the base64 module parse the whole document


SPACES = st.sampled_from(["", "", "", " ", "\n", " \t\r\n  "])
SHAPES = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 4])),
)
FILES = st.binary(max_size=60)


@st.composite
def pixel_arrays(draw: st.DrawFn) -> str:
    shape = draw(SHAPES)
    values = draw(st.lists(st.integers(0, 255), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    comma = draw(SPACES) + "," + draw(SPACES)
    text = json.dumps(np.array(values).reshape(shape).tolist(), separators=(comma, ":"))
    return text.replace("[", "[" + draw(SPACES)).replace("]", draw(SPACES) + "]")


@st.composite
def base64_strings(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(["", "data:image/png;base64,", "DATA:;Base64,", "data:é;base64,"]))
    text += base64.b64encode(draw(FILES)).decode()
    escapes = draw(st.sampled_from([{}, {"/": "\\/"}, {"A": "\\u0041", "=": "\\u003D"}, {"d": "\\u0064"}]))
    for plain_text, escape in escapes.items():
        text = text.replace(plain_text, escape)
    return f'"{text}"'


SCALARS = st.sampled_from(
    ["null", "true", "5", "-0", "-1", "0.5", "1e2", "01", "1.", "nul", "2e19", "1e999", "{}", '"a":1']
)
BAD_STRINGS = st.sampled_from(
    ['"!"', '"A"', '"AAAA="', '"AA==AAAA"', '"data:,A"', r'"\ud800"', r'"\x"', r'"\\"', r'"\""']
)
BAD_SHAPES = st.sampled_from(["[]", "[1]", "[[]]", "[[1,[2]]]", "[[1],[2,3]]", "[[[1,2]]]", "[[[[1]]]]", "[[1],2]"])
BAD_PIXELS = st.sampled_from(
    "0.05|256|-1|1234|00|1e0|1.|-|,1|1 2|-0|-0.5|null,true|{}|[]1".split("|")  # noqa: SIM905
).map("[[{}]]".format)
OTHER_VALUES = st.one_of(SCALARS, BAD_STRINGS, BAD_SHAPES, BAD_PIXELS)


@st.composite
def documents(draw: st.DrawFn, images: st.SearchStrategy[str]) -> str:
    key = draw(st.sampled_from(['"images"', '"images"', '"im\\u0061ges"']))
    listed = (draw(SPACES) + "," + draw(SPACES)).join(draw(st.lists(images, min_size=1, max_size=4)))
    parts = ["", "{", key, ":", "[", listed, "]", "}", ""]
    return "".join(draw(SPACES) + part for part in parts)


GOOD = documents(pixel_arrays() | base64_strings())
MIXED = documents(pixel_arrays() | base64_strings() | OTHER_VALUES)
DAMAGE = st.sampled_from([*'[]{},:"\\0123-.e ', "", "null", '"images"', "\x00", "é", '"a":1,'])


def reference(body: bytes) -> list[Any]:
    """The images of a valid document, by orjson."""
    images = []
    for value in orjson.loads(body)["images"]:
        images.append(base64.b64decode(value.rpartition(",")[2]) if isinstance(value, str) else value)
    return images


@given(GOOD, st.sampled_from(SLICES))
def test_slices_give_the_images_that_orjson_gives(text: str, slice_bytes: int) -> None:
    body = text.encode()
    assert outcome(body, slice_bytes) == reference(body)


@given(MIXED, st.sampled_from(SLICES))
@example('{"images": [[[-0, 7]]]}', 1)
@example('{"images": [[[0.05]]]}', 12)
def test_slices_refuse_valid_json_with_the_same_status_and_field(text: str, slice_bytes: int) -> None:
    body = text.encode()
    assume(is_json(body))
    assert outcome(body, slice_bytes) == outcome(body, WHOLE)


@given(GOOD | MIXED, st.floats(0, 1), st.integers(0, 2), DAMAGE, st.sampled_from(SLICES))
def test_slices_of_damaged_documents_are_accepted_only_if_orjson_accepts_them(
    text: str, where: float, removed: int, inserted: str, slice_bytes: int
) -> None:
    at = int(where * len(text))
    body = (text[:at] + inserted + text[at + removed :]).encode()
    result, expected = outcome(body, slice_bytes), outcome(body, WHOLE)
    if is_json(body) or isinstance(result, list):
        assert result == expected


@given(GOOD, st.floats(0, 1, exclude_max=True), st.sampled_from(SLICES))
def test_slices_of_truncated_documents_are_400(text: str, where: float, slice_bytes: int) -> None:
    text = text.rstrip()
    body = text.encode()[: 1 + int(where * (len(text) - 1))]
    assume(slice_bytes < len(body) < len(text.encode()))
    assert outcome(body, slice_bytes) == (400, None)


@given(st.text("AB+/=-\n", max_size=24), st.sampled_from(SLICES))
@example("AAAA" * 3 + "=" * 9, 4)
@example("AA==" * 2, 4)
def test_base64_in_slices_is_decoded_like_the_whole_text(text: str, slice_bytes: int) -> None:
    try:
        expected: object = [base64.b64decode(text, validate=True)]
    except ValueError:
        expected = (400, "images[0]")
    assert outcome(as_json(text), slice_bytes) == (expected if "\n" not in text else (400, "images[0]"))


@given(st.binary(max_size=40), st.sampled_from(SLICES))
def test_any_bytes_are_refused_if_orjson_refuses_them(content: bytes, slice_bytes: int) -> None:
    body = b'{"images": [' + content + b"]}"
    if not is_json(body):
        assert isinstance(outcome(body, slice_bytes), tuple)


# Sentences


@pytest.mark.parametrize(
    ("image", "detail"),
    [
        ("[[1, 2.0]]", "images[1] holds a fractional or huge number among its pixels;"),
        ("[[1, 2e5]]", "images[1] holds a fractional or huge number among its pixels;"),
        ("[[18446744073709551616]]", "images[1] holds a fractional or huge number among its pixels;"),
        ("[[1, true]]", "images[1] holds true or false among its pixels;"),
        ("[[1, null]]", "images[1] holds null among its pixels;"),
        ('[[1, "2"]]', "images[1] holds a string among its pixels;"),
        ("[[1, {}]]", "images[1] holds an object among its pixels;"),
        ("[[1, [2]]]", "images[1] holds an array among its pixels;"),
        ("[[0, 256]]", "images[1] has the pixel 256;"),
        ("[[0, 1000]]", "images[1] has the pixel 1000;"),
        ("[[-17, 5]]", "images[1] has the pixel -17;"),
        ("[[1, 2], [3]]", "images[1] has rows of different lengths;"),
        ("[[[1, 2, 3]], [[1, 2, 3], [4, 5, 6]]]", "images[1] has rows of different lengths;"),
        ("[[1], []]", "images[1] holds an empty array;"),
        ("[1, 2]", "images[1] has the shape 2;"),
        ("[[[1, 2]]]", "images[1] has the shape 1×1×2;"),
        ("[[[[1], [2]]]]", "images[1] has the shape 1×1×2×1;"),
        ("5", "images[1] is a number;"),
        ("null", "images[1] is null;"),
        ('{"a": 1}', "images[1] is an object;"),
        ('"not base64!"', "images[1] is not base64 ("),
        ('"data:image/png,AAAA"', "images[1] is a data: URL that is not base64;"),
        ("[[01]]", "The body is not JSON (unexpected content at byte"),
        ("[[1 2]]", "The body is not JSON (unexpected content at byte"),
        ("[[1,]]", "The body is not JSON (unexpected content at byte"),
    ],
)
@pytest.mark.parametrize("slice_bytes", [1, 8, 30])
def test_a_refusal_names_the_image_and_the_fault(image: str, detail: str, slice_bytes: int) -> None:
    problem = refusal(b'{"images": ["AAAA", ' + image.encode() + b', "AAAA"]}', slice_bytes)
    assert problem.detail.startswith(detail)
    assert problem.accepted


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"images": []}', "The key 'images' is empty"),
        (b"{ }", "The key 'images' is missing"),
        (b'{"images": null}', "The key 'images' is null"),
        (b'{"images": "AAAA"}', "The key 'images' is a string"),
        (b'{"images": {"a": 1}}', "The key 'images' is an object"),
        (b'{"image": ["AAAA"]}', "The key 'image' is unknown"),
        (b'{"images": ["AAAA"], "extra": 1}', "The key 'extra' is unknown"),
        (b'{"' + b"k" * 5000 + b'": 1}', "The key '" + "k" * 61 + "...' is unknown"),
        (b'{"images": ["AAAA"], "images": ["AAAA"]}', "The key 'images' is given more than once"),
        (b'["AAAA"]', "The JSON body is an array"),
        (b'"AAAA"', "The JSON body is a string"),
        (b"-1.5", "The JSON body is a fractional or huge number"),
        (b'{"images": [["AAAA"', "The body is not JSON"),
        (b'{"images": ["AAAA"]]', "The body is not JSON"),
        (b'{"images": ["AAAA"}}', "The body is not JSON"),
        (b'{"images": ["AAAA"],}', "The body is not JSON"),
        (b'{"images": ["AAAA"] 5}', "The body is not JSON"),
        (b'{"images", ["AAAA"]}', "The body is not JSON"),
        (b'{"images"}', "The body is not JSON"),
        (b'{images: ["AAAA"]}', "The body is not JSON"),
        (b'{5: ["AAAA"]}', "The body is not JSON"),
        (b'{"images": ["AAAA"]} {}', "The body is not JSON"),
        (b'{"images": [5 5]}', "The body is not JSON"),
        (b'{"images": ["data:\x01;base64,AAAA"]}', "The body is not JSON"),
        (b'{"images": ["data:\xff;base64,AAAA"]}', "The body is not JSON"),
        (b'{"images": ["data:\\x;base64,AAAA"]}', "The body is not JSON"),
        (b'{"images": [\\"AAAA\\"]}', "The body is not JSON"),
        (b"  ", "The body is not JSON"),
    ],
)
@pytest.mark.parametrize("slice_bytes", [1, 7])
def test_a_refused_document_gets_the_same_sentence_in_slices(body: bytes, detail: str, slice_bytes: int) -> None:
    assert refusal(body, slice_bytes).detail.startswith(detail)
    assert outcome(body, slice_bytes) == outcome(body, WHOLE)


# Limits


@pytest.mark.parametrize("slice_bytes", [1, 7, WHOLE])
def test_the_number_of_numbers_is_limited_exactly(slice_bytes: int) -> None:
    limits = Limits(body_bytes=1000, images=4, json_depth=16, json_numbers=6)
    assert outcome(as_json([[1, 2], [3, 4]], [[5, 6]]), slice_bytes, limits) == [[[1, 2], [3, 4]], [[5, 6]]]
    problem = refusal(as_json([[1, 2], [3, 4]], [[5, 6, 7]]), slice_bytes, limits)
    assert (problem.status, problem.field) == (413, None)
    assert problem.detail == (
        "The JSON body has too many numbers; accepted: at most 6; send image files instead of pixels."
    )


@pytest.mark.parametrize("slice_bytes", [1, 7, WHOLE])
def test_commas_in_strings_are_not_counted_as_numbers(slice_bytes: int) -> None:
    limits = Limits(body_bytes=1000, images=4, json_depth=16, json_numbers=2)
    assert outcome(as_json("data:,,;base64,AAAA"), slice_bytes, limits) == (422, "images[0]")


@pytest.mark.parametrize("slice_bytes", [1, 7])
def test_too_many_images_are_refused_before_they_are_parsed(slice_bytes: int) -> None:
    assert len(parse_json(as_json(*["AAAA"] * 4), LIMITS, slice_bytes)) == 4
    assert outcome(as_json(*["not base64!"] * 5), slice_bytes) == (413, "images")


@pytest.mark.parametrize("slice_bytes", [1, 7])
def test_depth_is_limited_across_slices_and_brackets_in_strings_are_ignored(slice_bytes: int) -> None:
    limits = Limits(body_bytes=1000, images=4, json_depth=4)
    assert outcome(b'{"images": [[[5]]]}', slice_bytes, limits) == [[[5]]]
    assert "nested too deep" in refusal(b'{"images": [[[[5]]]]}', slice_bytes, limits).detail
    assert "not base64" in refusal(rb'{"images": ["[[[[\"[[\\"]}', slice_bytes, limits).detail


@pytest.mark.parametrize(("size", "accepted"), [(SLICE_BYTES - 1, True), (SLICE_BYTES, False)])
def test_the_header_of_a_data_url_is_limited(size: int, accepted: bool) -> None:
    header = "data:" + "x" * (size - len("data:;base64")) + ";base64"
    body = as_json(header + ",AAAA", [[5]])
    assert outcome(body, SLICE_BYTES) == ([b"\0\0\0", [[5]]] if accepted else (422, "images[0]"))


# Large documents


def large_document(kind: str) -> bytes:
    rng = np.random.default_rng(0)
    match kind:
        case "pixels":
            return as_json(rng.integers(0, 256, (400, 300, 3)).tolist(), rng.integers(0, 256, (500, 400)).tolist())
        case "base64":
            return as_json(base64.b64encode(rng.bytes(10**6)).decode(), "AAAA")
        case "escapes":
            text = base64.b64encode(rng.bytes(5 * 10**5)).decode()
            return as_json("data:image/png;base64," + text).replace(b"/", rb"\/").replace(b"B", rb"\u0042")
        case "floats":
            return as_json([[0.125] * 200_000])
    return as_json([[None] * 200_000])


@pytest.mark.parametrize("kind", ["pixels", "base64", "escapes"])
def test_a_large_document_gives_the_images_that_orjson_gives(kind: str) -> None:
    body = large_document(kind)
    assert len(body) > 8 * SLICE_BYTES
    assert plain(parse_json(body, LIMITS)) == reference(body)


@pytest.mark.parametrize("kind", ["pixels", "base64", "escapes", "floats", "nulls"])
def test_parsing_uses_at_most_three_times_the_memory_of_a_large_body(kind: str) -> None:
    body = large_document(kind)
    tracemalloc.start()
    try:
        with suppress(Problem):
            parse_json(body, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)
