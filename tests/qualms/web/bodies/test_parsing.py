"""Request bodies: reading within limits, and parsing raw images, forms and JSON."""

import asyncio
import base64
import json
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive

from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess_array
from qualms.inference.batch import ClientDisconnected
from qualms.web.bodies.parsing import ImageInput, Limits, parse_images, read_body
from qualms.web.problems import Problem

LIMITS = Limits(body_bytes=2**24, images=4, json_depth=16)
FORM = b"multipart/form-data; boundary=edge"
JSON = b"application/json"


def receiving(*messages: MutableMapping[str, Any]) -> Receive:
    """An ASGI `receive` that returns these messages; a further call fails."""
    remaining = list(messages)

    async def receive() -> MutableMapping[str, Any]:
        return remaining.pop(0)

    return receive


def chunk(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def part(data: bytes, disposition: str = 'form-data; name="image"; filename="a.png"') -> bytes:
    return b"--edge\r\nContent-Disposition: " + disposition.encode() + b"\r\n\r\n" + data + b"\r\n"


def as_json(*images: object) -> bytes:
    return json.dumps({"images": images}).encode()


def refusal(content_type: bytes, body: bytes, limits: Limits = LIMITS) -> Problem:
    with pytest.raises(Problem) as caught:
        parse_images(content_type, body, limits)
    return caught.value


def pixels(image: ImageInput) -> list[Any]:
    assert isinstance(image, np.ndarray)
    assert image.dtype == np.uint8
    listed: list[Any] = image.tolist()
    return listed


# Reading


def test_a_body_in_one_message_is_not_copied() -> None:
    body = bytes(500)
    assert asyncio.run(read_body({b"content-length": b"500"}, receiving(chunk(body)), 500)) is body


def test_a_body_in_pieces_is_joined() -> None:
    receive = receiving(chunk(b"ab", more=True), {"type": "http.request", "more_body": True}, chunk(b"c"))
    assert asyncio.run(read_body({}, receive, 3)) == b"abc"


def test_a_message_without_a_body_is_an_empty_one() -> None:
    assert asyncio.run(read_body({}, receiving({"type": "http.request"}), 3)) == b""


def test_a_body_announced_as_too_large_is_413_before_it_is_read() -> None:
    with pytest.raises(Problem, match="at most 1,000 bytes") as caught:
        asyncio.run(read_body({b"host": b"x", b"content-length": b"1001"}, receiving(), 1000))
    assert caught.value.status == 413


def test_a_body_that_exceeds_the_limit_while_it_is_read_is_413() -> None:
    receive = receiving(chunk(bytes(600), more=True), chunk(bytes(401), more=True))
    with pytest.raises(Problem) as caught:
        asyncio.run(read_body({b"transfer-encoding": b"chunked"}, receive, 1000))
    assert caught.value.status == 413


@pytest.mark.parametrize("value", [b"", b"many", b"\xff", b"9" * 5000])
def test_a_content_length_that_is_not_a_number_is_400(value: bytes) -> None:
    with pytest.raises(Problem) as caught:
        asyncio.run(read_body({b"content-length": value}, receiving(), 1000))
    assert (caught.value.status, caught.value.field) == (400, "Content-Length")


def test_a_disconnect_while_reading_is_reported() -> None:
    with pytest.raises(ClientDisconnected):
        asyncio.run(read_body({}, receiving(chunk(b"a", more=True), {"type": "http.disconnect"}), 1000))


# Content types


@pytest.mark.parametrize(
    "content_type", [b"image/png", b"IMAGE/JPEG", b"image/webp; q=1", b" application/octet-stream "]
)
def test_a_raw_body_is_one_image(content_type: bytes) -> None:
    body = b"any bytes"
    (image,) = parse_images(content_type, body, LIMITS)
    assert image is body


@pytest.mark.parametrize(
    "content_type", [b"", b"text/plain", b"images/png", b"multipart/mixed; boundary=e", "é→".encode()]
)
def test_any_other_content_type_is_415_and_lists_the_accepted_ones(content_type: bytes) -> None:
    problem = refusal(content_type, b"x")
    assert (problem.status, problem.field) == (415, "Content-Type")
    assert problem.accepted == "image/*, application/octet-stream, multipart/form-data, application/json"


@pytest.mark.parametrize("content_type", [b"image/png", FORM, JSON, b""])
def test_an_empty_body_is_400(content_type: bytes) -> None:
    assert refusal(content_type, b"").status == 400


# Multipart


def test_every_file_part_is_an_image_in_order_with_any_field_name() -> None:
    first = b"\r\n--edg\r\n\x00\xff--"
    body = part(first) + part(b"", 'form-data; name="other"; filename=""') + part(b"3") + b"--edge--\r\nepilogue"
    assert parse_images(FORM, body, LIMITS) == [first, b"", b"3"]


def test_a_quoted_boundary_and_other_part_headers_are_accepted() -> None:
    body = part(b"1").replace(b"\r\n\r\n", b"\r\nContent-Type: image/png\r\n\r\n").replace(b"Content-D", b"content-d")
    assert parse_images(b'multipart/form-data; charset=utf-8; boundary="edge"', body + b"--edge--", LIMITS) == [b"1"]


def test_a_field_that_is_not_a_file_is_422_and_named() -> None:
    problem = refusal(FORM, part(b"1") + part(b"0.1", 'form-data; name="target_fpr"') + b"--edge--")
    assert (problem.status, problem.field) == (422, "target_fpr")


def test_more_files_than_the_limit_are_413() -> None:
    assert len(parse_images(FORM, part(b"1") * 4 + b"--edge--", LIMITS)) == 4
    problem = refusal(FORM, part(b"1") * 5 + b"--edge--")
    assert (problem.status, problem.field, problem.accepted) == (413, "images", "at most 4")
    assert refusal(FORM, part(b"1") * 50 + b"--edge--").status == 413


def test_a_form_without_files_is_422() -> None:
    assert refusal(FORM, b"--edge--\r\n").status == 422


@pytest.mark.parametrize(
    "body",
    [
        b"no boundary at all",
        b"--edge",
        b"--edgeX\r\n\r\n",
        b"--edge\r\nContent-Disposition form-data\r\n\r\n1\r\n--edge--",
        b"--edge\r\n: empty\r\n\r\n1\r\n--edge--",
        b"\r\n",
        part(b"1"),
        part(b"1") + b"--edge-",
        part(b"1", "form-data; filename=" + "x" * 9000) + b"--edge--",
    ],
)
def test_a_damaged_form_is_400(body: bytes) -> None:
    assert refusal(FORM, body).status == 400


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=" + b"x" * 300,
        b"multipart/form-data; boundary*=edge",
    ],
)
def test_an_invalid_boundary_is_400(content_type: bytes) -> None:
    assert refusal(content_type, part(b"1") + b"--edge--").status == 400


# JSON


def test_base64_images_and_data_urls_are_decoded() -> None:
    text = base64.b64encode(b"\x89PNG bytes").decode()
    body = as_json(text, f"data:image/png;base64,{text}", f"DATA:;BASE64,{text}", "")
    assert parse_images(b"application/json; charset=utf-8", body, LIMITS) == [b"\x89PNG bytes"] * 3 + [b""]


def test_json_escapes_in_base64_are_resolved() -> None:
    assert parse_images(JSON, rb'{"im\u0061ges": ["\/\/8="]}', LIMITS) == [b"\xff\xff"]


@pytest.mark.parametrize(
    "image",
    [
        [[0, 255, 7]],
        [[[1], [2]], [[3], [4]]],
        [[[1, 2, 3], [4, 5, 6]]],
        [[[1, 2, 3, 255]]],
    ],
)
def test_pixel_arrays_of_every_accepted_shape_are_parsed(image: list[Any]) -> None:
    (parsed,) = parse_images(JSON, as_json(image), LIMITS)
    assert pixels(parsed) == image


def test_parsed_pixels_can_be_preprocessed() -> None:
    small, fitting = parse_images(JSON, as_json([[9, 9], [9, 9]], [[9] * 3] * 3), LIMITS)
    for image in (small, fitting):
        assert isinstance(image, np.ndarray)
        assert preprocess_array(image, InputSpec(height=3, width=3, colour="L")).ravel().tolist() == [9] * 9


def test_files_and_pixels_can_be_mixed() -> None:
    file, array = parse_images(JSON, as_json("AAAA", [[5]]), LIMITS)
    assert file == b"\0\0\0"
    assert pixels(array) == [[5]]


@pytest.mark.parametrize(
    ("image", "status", "detail"),
    [
        ([[1, 2], [3]], 422, "rows of different lengths"),
        ([[[1, 2, 3]], [[1, 2]]], 422, "rows of different lengths"),
        ([[1, [2]]], 422, "an array among"),
        ([[1, 2.0]], 422, "fractional"),
        ([[1, 2**64]], 422, "huge"),
        ([[1, True]], 422, "true or false"),
        ([[None, "1"]], 422, "a string and null"),
        ([[{}]], 422, "an object"),
        ([[0, 256]], 422, "from 0 to 256"),
        ([[-1, 255]], 422, "from -1 to 255"),
        ([], 422, "shape 0"),
        ([[]], 422, "shape 1×0"),
        ([[[]]], 422, "shape 1×1×0"),
        ([1, 2], 422, "shape 2;"),
        ([[[1, 2]]], 422, "shape 1×1×2"),
        ([[[[1]]]], 422, "shape 1×1×1×1"),
        (5, 422, "is a number"),
        (None, 422, "is null"),
        ({"a": 1}, 422, "is an object"),
        ("not base64!", 400, "is not base64"),
        ("QUJD\nREVG", 400, "is not base64"),
        ("é", 400, "is not base64"),
        ("AAA", 400, "is not base64"),
        ("data:image/png,AAAA", 422, "data: URL"),
        ("data:image/png;base64", 422, "data: URL"),
    ],
)
def test_an_invalid_json_image_is_refused_and_its_index_named(image: object, status: int, detail: str) -> None:
    problem = refusal(JSON, as_json("AAAA", image))
    assert (problem.status, problem.field) == (status, "images[1]")
    assert detail in problem.detail
    assert problem.accepted


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b'{"images": []}', 422, "images"),
        (b"{}", 422, "images"),
        (b'{"images": null}', 422, "images"),
        (b'{"images": "AAAA"}', 422, "images"),
        (b'{"image": ["AAAA"]}', 422, "image"),
        (b'{"images": ["AAAA"], "extra": 1}', 422, "extra"),
        (b'{"images": ["AAAA"], "images": ["AAAA"]}', 422, "images"),
        (b'{"images": ["AAAA"], "im\\u0061ges": ["AAAA"]}', 422, "images"),
        (b'{"images": {"a": 1}, "images": ["data:;base64,AAAA"]}', 422, "images"),
        (b'["AAAA"]', 422, None),
        (b'"AAAA"', 422, None),
        (b"null", 422, None),
        (b"{", 400, None),
        (b'{"images": ["AA', 400, None),
        (b'{"images": [NaN]}', 400, None),
        (b"\xff\xfe{\0}\0", 400, None),
        (b'{"images": ["\\ud800"]}', 400, None),
        (b'{"images": ["AAAA"]} {}', 400, None),
    ],
)
def test_an_invalid_json_document_is_refused_and_its_field_named(body: bytes, status: int, field: str | None) -> None:
    problem = refusal(JSON, body)
    assert (problem.status, problem.field) == (status, field)


def test_more_json_images_than_the_limit_are_413() -> None:
    assert len(parse_images(JSON, as_json(*["AAAA"] * 4), LIMITS)) == 4
    assert refusal(JSON, as_json(*["AAAA"] * 5)).status == 413


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"images":[', b'["]",', b'["\\"",', b'["\\\\",'])
def test_deeply_nested_json_is_refused_before_it_is_parsed(opening: bytes) -> None:
    problem = refusal(JSON, opening * 100_000)
    assert (problem.status, problem.detail) == (400, "The JSON body is nested too deep; accepted: at most 16 levels.")


def test_the_depth_limit_is_exact_and_ignores_brackets_in_strings() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a[[\\"[[\\\\": [' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"]}"

    assert "unknown" in refusal(JSON, nested(16)).detail
    assert "deep" in refusal(JSON, nested(17)).detail


def test_depth_is_counted_across_chunks() -> None:
    wide = b"[],".join([b""] * 70_000)
    assert "deep" in refusal(JSON, b'{"images": [' + wide + b"[" * 15).detail
    assert "not JSON" in refusal(JSON, b'{"images": [' + wide + b"[" * 14).detail
    text = b'"' + b"[" * 150_000 + b'"'
    assert "base64" in refusal(JSON, b'{"images": [' + text + b"]}").detail


def test_too_many_json_nodes_are_413_before_they_are_parsed() -> None:
    for node in (b"[],", b'"",', b"{},"):
        problem = refusal(JSON, b'{"images": [' + node * 2**20 + b"[]]}")
        assert (problem.status, "too many arrays or strings" in problem.detail) == (413, True)


def test_colons_in_strings_are_not_counted_as_keys() -> None:
    assert parse_images(JSON, b'{"images": ["data:a:b;base64,AAAA"]}', LIMITS) == [b"\0\0\0"]


# Arbitrary bytes


ANY_BYTES = st.binary(max_size=300)
CONTENT_TYPES = st.one_of(
    st.sampled_from([b"image/png", b"application/octet-stream", FORM, JSON, b"multipart/form-data; boundary=\r\n-"]),
    st.binary(max_size=60).map(b"multipart/form-data; ".__add__),
    st.binary(max_size=60),
)
FORM_PIECES = st.lists(
    st.one_of(
        st.sampled_from([b"--edge", b"\r\n", b"--", b"Content-Disposition: form-data; filename=a", b":", b"\r", b'"']),
        st.binary(max_size=8),
    ),
    max_size=30,
).map(b"".join)
JSON_PIECES = st.lists(
    st.sampled_from(
        [b"[", b"]", b"{", b"}", b'"', b"\\", b":", b",", b"images", b"0", b"-1", b"1e9", b"AAAA", b"null"]
    ),
    max_size=30,
).map(b"".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 256) | st.floats(0, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    """Levels of nesting of a parsed document."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(JSON_VALUES, st.integers(1, 4), st.booleans())
def test_depth_agrees_with_the_parsed_document(value: object, limit: int, ascii_only: bool) -> None:
    body = json.dumps({"[:\\": value, '"': "{"}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    too_deep = "nested too deep" in refusal(JSON, body, Limits(1000, 4, limit)).detail
    assert too_deep == (1 + depth_of(value) > limit)


def check_images_or_problem(content_type: bytes, body: bytes) -> None:
    try:
        images = parse_images(content_type, body, LIMITS)
    except Problem as problem:
        assert problem.status in (400, 413, 415, 422)
        assert len(problem.body("r1")) < 2000
    else:
        assert 1 <= len(images) <= LIMITS.images
        assert all(isinstance(image, bytes) or image.dtype == np.uint8 for image in images)


@given(CONTENT_TYPES, ANY_BYTES)
def test_any_bytes_of_any_content_type_give_images_or_a_problem(content_type: bytes, body: bytes) -> None:
    check_images_or_problem(content_type, body)


@given(FORM_PIECES)
def test_random_form_fragments_give_images_or_a_problem(body: bytes) -> None:
    check_images_or_problem(FORM, body)


@given(JSON_PIECES)
def test_random_json_fragments_give_images_or_a_problem(body: bytes) -> None:
    check_images_or_problem(JSON, body)


@given(st.lists(JSON_VALUES, max_size=5))
def test_any_json_value_as_an_image_gives_images_or_a_problem(images: list[Any]) -> None:
    check_images_or_problem(JSON, as_json(*images))


@given(
    st.lists(st.binary(max_size=20).filter(lambda data: b"\r\n--edge" not in b"\r\n" + data), min_size=1, max_size=4)
)
def test_files_in_forms_and_json_are_unchanged(files: list[bytes]) -> None:
    form = b"".join(map(part, files)) + b"--edge--\r\n"
    assert parse_images(FORM, form, LIMITS) == files
    encoded = [base64.b64encode(file).decode() for file in files]
    assert parse_images(JSON, as_json(*encoded), LIMITS) == files
