"""Forms parsed in slices, and limits on what a hostile form costs."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qualms.web.bodies.limits import Limits
from qualms.web.bodies.multipart_images import (
    MAX_CONTENT_TYPE,
    MAX_OPTIONS,
    MAX_PART_HEADER_BYTES,
    MAX_PART_HEADERS,
    parse_multipart,
)
from qualms.web.problems import Problem

LIMITS = Limits(body_bytes=2**24, images=4, json_depth=16)
FORM = b"multipart/form-data; boundary=edge"
DISPOSITION = b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n'
WHOLE = 2**30
SLICES = (1, 2, 3, 7, 30)


def part(data: bytes, headers: bytes = DISPOSITION) -> bytes:
    return b"--edge\r\n" + headers + b"\r\n" + data + b"\r\n"


def outcome(body: bytes, slice_bytes: int = WHOLE, content_type: bytes = FORM) -> object:
    """The files, or status and field of the problem."""
    try:
        return parse_multipart(content_type, body, LIMITS, slice_bytes)
    except Problem as problem:
        return problem.status, problem.field


PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"--edge", b"\r\n", b"\r\n--edge", b"--", part(b"x"), DISPOSITION, b"\r", b"--edge--", b"\r\n--edg", b"-"]
        ),
        st.binary(max_size=8),
    ),
    max_size=12,
).map(b"".join)


@given(PIECES.filter(bool), st.sampled_from(SLICES))
@example(b"\r\npreamble" + part(b"1") + b"--edge--", 3)
@example(part(b"\r\n--edg\r\n--edgX") + b"--edge--epilogue", 2)
def test_slices_give_the_same_files_or_status_as_the_whole_form(body: bytes, slice_bytes: int) -> None:
    assert outcome(body, slice_bytes) == outcome(body)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.sampled_from(SLICES))
def test_files_in_slices_are_unchanged(files: list[bytes], slice_bytes: int) -> None:
    files = [file.replace(b"--edge", b"") for file in files]
    assert outcome(b"".join(map(part, files)) + b"--edge--\r\n", slice_bytes) == files


@pytest.mark.parametrize("slice_bytes", [1, 7, WHOLE])
def test_delimiters_are_counted_across_slices_before_parsing(slice_bytes: int) -> None:
    not_parsed = b"--edge\r\nno header\r\n"
    assert outcome(not_parsed * 5 + b"\r\n--edge--", slice_bytes) == (400, None)
    assert outcome(not_parsed * 7 + b"\r\n--edge--", slice_bytes) == (413, "images")


@pytest.mark.parametrize("slice_bytes", [7, WHOLE])
def test_the_number_of_part_headers_is_limited(slice_bytes: int) -> None:
    headers = DISPOSITION + b"a: b\r\n" * (MAX_PART_HEADERS - 1)
    assert outcome(part(b"1", headers) + b"--edge--", slice_bytes) == [b"1"]
    assert outcome(part(b"1", headers + b"a: b\r\n") + b"--edge--", slice_bytes) == (400, None)


@pytest.mark.parametrize("slice_bytes", [7, WHOLE])
@pytest.mark.parametrize("header", [b"%s: x", b"x: %s"])
def test_the_length_of_a_part_header_is_limited(header: bytes, slice_bytes: int) -> None:
    for size, expected in ((MAX_PART_HEADER_BYTES, [b"1"]), (MAX_PART_HEADER_BYTES + 1, (400, None))):
        line = header % (b"a" * (size - 3)) + b"\r\n"
        assert outcome(part(b"1", DISPOSITION + line) + b"--edge--", slice_bytes) == expected


def test_the_number_of_options_in_a_content_disposition_is_limited() -> None:
    options = DISPOSITION.rstrip() + b";a" * (MAX_OPTIONS - 2)
    assert outcome(part(b"1", options + b"\r\n") + b"--edge--") == [b"1"]
    assert outcome(part(b"1", options + b";a\r\n") + b"--edge--") == (400, None)


def test_the_length_of_the_content_type_is_limited() -> None:
    padded = FORM + b";" * (MAX_CONTENT_TYPE - len(FORM))
    assert outcome(part(b"1") + b"--edge--", content_type=padded) == [b"1"]
    assert outcome(part(b"1") + b"--edge--", content_type=padded + b";") == (400, "Content-Type")


def test_a_preamble_and_an_epilogue_longer_than_a_slice_are_skipped() -> None:
    body = b"\r\n" + b"x" * 500 + part(b"1") + b"--edge--\r\n" + b"y" * 500
    assert outcome(body, 16) == [b"1"]
