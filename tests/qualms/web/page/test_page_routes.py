"""The files of the page: headers, size, the switch, and that the wheel has them."""

import re
from collections.abc import Callable

import httpx
import pytest

from qualms.web.page.routes import POLICY, static_files

Start = Callable[..., httpx.Client]


def test_the_page_and_all_files_it_names_are_served_with_the_content_security_policy(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text))
    assert {"page/app.js", "page/style.css", "page/icon.svg"} <= names
    scripts = [name for name in static_files() if name.endswith(".js")]
    imported = {
        name for script in scripts for name in re.findall(r'from "\./([^"]+)"', client.get(f"/page/{script}").text)
    }
    assert imported < set(scripts)
    for path in ["/", *(f"/{name}" for name in names), *(f"/page/{name}" for name in scripts), "/page/digit-7.png"]:
        reply = client.get(path)
        assert (reply.status_code, reply.headers["content-security-policy"]) == (200, POLICY), path
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_policy_allows_neither_inline_code_nor_other_hosts() -> None:
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_all_files_together_are_smaller_than_150_kb_and_name_no_other_host() -> None:
    files = static_files()
    assert {"index.html", "app.js", "style.css"} <= set(files)
    assert sum(len(file.content) for file in files.values()) < 150_000
    for name, file in files.items():
        hosts = set(re.findall(rb"https?://[\w.]+", file.content))
        assert hosts <= {b"http://www.w3.org"}, name  # the name of the SVG namespace


def test_an_unchanged_file_is_not_sent_again(client: httpx.Client) -> None:
    etag = client.get("/page/app.js").headers["etag"]
    again = client.get("/page/app.js", headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "digit-10.png", "../routes.py", "%2e%2e/routes.py"])
def test_other_names_are_404(client: httpx.Client, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_the_page_can_be_switched_off(start_service: Start) -> None:
    client = start_service(page=False)
    assert [client.get(path).status_code for path in ("/", "/page/app.js")] == [404, 404]
    assert client.get("/status").status_code == 200
