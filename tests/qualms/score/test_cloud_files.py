"""Files by URI: the rows of the same files by path, and errors of object stores in one sentence."""

import csv
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from qualms.bundle.file import Bundle
from qualms.errors import ImageError
from qualms.score.cloud_files import read_cloud_file
from qualms.score.items import Item, ScoreError, read_item
from qualms.score.listing import Listing
from qualms.score.run import score

FILES = {"a/1.png": b"first", "a/.hidden.png": b"hidden", "a/b/2 ü.png": b"second", "a/c.txt": b"text"}
"""the objects of the bucket `open`; `closed` is forbidden, and others do not exist"""


class Store(BaseHTTPRequestHandler):
    """Enough of S3's protocol to list and to read."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if bucket == "closed":
            self.reply(403, _error("AccessDenied"))
        elif bucket != "open":
            self.reply(404, _error("NoSuchBucket"))
        elif key:
            self.reply(*((200, FILES[key]) if key in FILES else (404, _error("NoSuchKey"))))
        else:
            query = parse_qs(url.query)
            self.reply(200, _listing(query.get("prefix", [""])[0], query.get("delimiter", [""])[0]))

    def reply(self, status: int, body: bytes) -> None:
        ranged = self.headers.get("Range")
        total = len(body)
        if ranged and status == 200:
            start, _, end = ranged.removeprefix("bytes=").partition("-")
            body, status = body[int(start) : int(end) + 1], 206
        self.send_response(status)
        if status == 206 and ranged:
            self.send_header("Content-Range", f"{ranged.replace('=', ' ')}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing(prefix: str, delimiter: str) -> bytes:
    keys = [key for key in FILES if key.startswith(prefix)]
    folders = sorted(
        {prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if delimiter and "/" in key[len(prefix) :]}
    )
    files = [key for key in keys if not delimiter or "/" not in key[len(prefix) :]]
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>{len(FILES[key])}</Size><LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in files
    )
    common = "".join(f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in folders)
    count = f"<KeyCount>{len(files) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
    return (
        f"<?xml version='1.0'?><ListBucketResult><Name>open</Name>{count}{contents}{common}</ListBucketResult>".encode()
    )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The query of URIs of a local object store."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"?endpoint_override=127.0.0.1:{server.server_port}&scheme=http&region=us-east-1"
        server.shutdown()
        thread.join()


def items(argument: str, scratch: Path) -> list[Item]:
    return list(Listing([argument], scratch))


def test_images_of_a_bucket_are_listed_in_order_and_read(store: str, tmp_path: Path) -> None:
    listed = items(f"s3://open/a{store}", tmp_path)
    assert [(item.name, item.size) for item in listed] == [("s3://open/a/1.png", 5), ("s3://open/a/b/2 ü.png", 6)]
    assert all(item.stamp > 0 for item in listed)
    assert [read_item(Item.from_json(item.to_json())) for item in listed] == [b"first", b"second"]
    assert [item.name for item in items(f"s3://open/a/c.txt{store}", tmp_path)] == ["s3://open/a/c.txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("closed/a", "cannot be listed: permission denied."),
        ("missing/a", "There is no file or folder|there is no such"),
        ("open/none", "There is no file or folder s3://open/none"),
        ("open/a//b", "s3://open/a//b.* cannot be listed: Empty path component in path open/a//b."),
    ],
)
def test_a_bucket_that_cannot_be_read_is_one_sentence_and_leaves_no_files(
    store: str, bundle: Bundle, tmp_path: Path, path: str, message: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ScoreError, match=message) as caught:
        score(bundle, [f"s3://{path}{store}"], out / "out.csv")
    assert "\n" not in str(caught.value)
    assert list(out.iterdir()) == []


def test_a_file_that_cannot_be_read_is_an_error_of_its_row(store: str) -> None:
    with pytest.raises(ImageError, match="^The file cannot be read: permission denied.$"):
        read_cloud_file(f"s3://closed/1.png{store}")
    with pytest.raises(ImageError, match="^The file cannot be read: "):
        read_cloud_file(f"s3://open/none.png{store}")
    with pytest.raises(ImageError, match="^The file cannot be read: Empty path component in path open/a//1.png.$"):
        read_cloud_file(f"s3://open/a//1.png{store}")


@pytest.mark.parametrize("path", ["closed/a", "open/none", "open/a//b"])
def test_a_password_in_a_uri_is_not_in_messages(store: str, tmp_path: Path, path: str) -> None:
    with pytest.raises(ScoreError, match=f"s3://{path}") as caught:
        items(f"s3://id:password@{path}{store}", tmp_path)
    assert "password" not in str(caught.value)
    with pytest.raises(ImageError) as unreadable:
        read_cloud_file("s3://id:password@open/1.png?unknown=1")
    assert "password" not in str(unreadable.value)


def test_files_by_uri_have_the_rows_of_files_by_path(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    score(bundle, [str(images)], tmp_path / "path.csv")
    score(bundle, [images.as_uri()], tmp_path / "uri.csv")
    rows = []
    for name in ("path.csv", "uri.csv"):
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            rows.append(list(csv.DictReader(file)))
    by_path, by_uri = rows
    assert [row.pop("path") for row in by_uri] == [f"file://{row.pop('path')}" for row in by_path]
    assert by_uri == by_path


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("bad://place/a", "bad://place/a cannot be opened: Unrecognized filesystem type"),
        ("file:///no/such/folder", "There is no file or folder file:///no/such/folder"),
        ("s3://open/images.zip", "archives are read from local paths only"),
    ],
)
def test_a_uri_that_is_not_accepted_is_one_sentence(uri: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match=message):
        items(uri, tmp_path)
