"""The page in a real Chromium: verdicts, drawing, errors, accessibility, and that nothing leaves the machine."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qualms.access.keys import Key
from qualms.access.keys_file import add_key
from qualms.bundle.embedded import resolve_model

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]
TIMEOUT_MILLISECONDS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page of a running service; records what must not happen."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(TIMEOUT_MILLISECONDS)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._logged)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add("/".join(request.url.split("/")[:3])))
        self.url = url
        self.page.goto(url)

    def _logged(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def use_sample(self, name: str) -> None:
        """Send a sample and wait for its result."""
        self.use_sample_without_calibration(name)
        self.page.wait_for_selector("#scores svg")

    def use_sample_without_calibration(self, name: str) -> None:
        """Send a sample and wait for all of its result that needs no calibration."""
        with self.page.expect_response(lambda reply: "predict" in reply.url):
            self.page.get_by_role("button", name=name, exact=True).click()
        self.page.wait_for_selector("#result:not([hidden]) #simplex .density")

    def violations(self) -> list[str]:
        """Serious violations that axe finds."""
        found = axe.Axe().run(self.page).response["violations"]
        return [f"{one['id']}: {one['nodes']}" for one in found if one["impact"] in ("serious", "critical")]

    def check(self) -> None:
        """No error, no violation of the policy, and no request to another host."""
        assert self.complaints == []
        assert {host for host in self.hosts if not host.startswith("blob:")} == {self.url}


@pytest.fixture
def visit(browser: Any, service_process: Callable[..., Any]) -> Callable[..., Visit]:
    def start(model: Path, **options: Any) -> Visit:
        return Visit(browser, service_process(model)[1], **options)

    return start


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_known_digit_is_accepted_and_a_scribble_is_flagged(visit: Callable[..., Visit], scheme: str) -> None:
    visitor = visit(resolve_model("mnist"), color_scheme=scheme)
    page = visitor.page
    visitor.use_sample("Digit 3")
    assert page.inner_text("#label") == "3"
    assert page.locator("#badges").inner_text().split("\n") == ["Not flagged", "Accepted"]
    assert "can be relied on" in page.inner_text("#sentence")
    assert page.locator("#alpha li").count() == 10
    assert page.locator("#scores li").count() == 12
    assert visitor.violations() == []
    visitor.use_sample("Scribble")
    assert "Flagged" in page.inner_text("#badges")
    assert "rarer than 99.9" in page.inner_text("#sentence")
    assert page.locator("#terms .largest").count() == 1
    assert "curl --data-binary @scribble.png" in page.inner_text("#curl")
    assert visitor.violations() == []
    visitor.check()


def test_the_pad_can_be_drawn_on_with_the_mouse_and_by_keyboard(visit: Callable[..., Visit]) -> None:
    visitor = visit(resolve_model("mnist"))
    page = visitor.page
    page.wait_for_selector("#pad-block:not([hidden])")
    box = page.locator("#pad").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 10, box["y"] + box["height"] - 40, steps=12)
    page.mouse.up()
    page.wait_for_selector("#result:not([hidden])")
    assert page.inner_text("#label") == "1"
    page.click("#pad-clear")
    page.focus("#pad")
    page.keyboard.press("Space")
    for _ in range(18):
        page.keyboard.press("ArrowDown")
    with page.expect_response(lambda reply: "predict" in reply.url):
        page.keyboard.press("Enter")
    assert page.inner_text("#label") == "1"
    visitor.check()


def test_operating_points_appear_with_the_calibration_of_the_selected_model(visit: Callable[..., Visit]) -> None:
    visitor = visit(resolve_model("mnist"))
    page = visitor.page
    page.wait_for_selector("#point:not([hidden])")
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/calibration", hold)
    page.reload()
    page.wait_for_selector("#recent svg")
    visitor.use_sample_without_calibration("Digit 3")
    assert not page.is_visible("#point")
    assert not page.is_visible("#scores-block")
    held[0].continue_()
    page.wait_for_selector("#point:not([hidden])")
    page.wait_for_selector("#scores svg")
    visitor.check()


def test_the_slider_sends_only_supported_operating_points(visit: Callable[..., Visit]) -> None:
    visitor = visit(resolve_model("mnist"))
    page = visitor.page
    visitor.use_sample("Digit 3")
    page.focus("#rate")
    for key in ("Home", "End"):
        with page.expect_response(lambda reply: "target_fpr" in reply.url) as reply:
            page.keyboard.press(key)
        assert reply.value.status == 200
    with page.expect_response(lambda reply: "by-class" in reply.url) as reply:
        page.select_option("#guarantee", "by-class")
    assert reply.value.status == 200
    visitor.check()


def test_errors_are_shown_in_words(visit: Callable[..., Visit]) -> None:
    visitor = visit(resolve_model("mnist"))
    page = visitor.page
    page.wait_for_selector("#samples button")
    files = [{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no image"}]
    with page.expect_response(lambda reply: "predict" in reply.url):
        page.set_input_files("#file", files)
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error strong") == "The content is not an accepted image or type"
    visitor.complaints.clear()  # Chromium reports every reply with an error status
    visitor.use_sample("Digit 7")
    assert not page.is_visible("#error")
    visitor.check()


@pytest.mark.parametrize(
    ("status", "headers", "text"),
    [
        (413, {}, "The request is too large: too many bytes."),
        (429, {"Retry-After": "3"}, "The request is too large: too many bytes. Try again in 3 s."),
    ],
)
def test_refusals_are_shown_with_when_to_try_again(
    visit: Callable[..., Visit], status: int, headers: dict[str, str], text: str
) -> None:
    visitor = visit(resolve_model("mnist"))
    problem = {
        "type": "about:blank",
        "title": "Refused",
        "status": status,
        "detail": "The request is too large: too many bytes.",
    }
    visitor.page.route("**/predict?*", lambda route: route.fulfill(status=status, headers=headers, json=problem))
    visitor.page.get_by_role("button", name="Digit 3", exact=True).click()
    visitor.page.wait_for_selector("#error:not([hidden])")
    assert visitor.page.inner_text("#error").split("\n") == ["Refused", text]
    assert not visitor.page.is_visible("#result")


def test_a_service_that_is_stopped_is_named_as_the_cause(browser: Any, service_process: Callable[..., Any]) -> None:
    process, url = service_process(resolve_model("mnist"))
    page = Visit(browser, url).page
    page.wait_for_selector("#samples img[src]")
    page.wait_for_selector("#point:not([hidden])")
    process.kill()
    process.wait()
    page.get_by_role("button", name="Digit 3", exact=True).click()
    page.wait_for_selector("#error:not([hidden])")
    assert "The service cannot be reached" in page.inner_text("#error")
    page.locator("#recent-text", has_text="The service cannot be reached").wait_for()


def test_a_service_with_another_model_than_before_is_shown_with_its_own_calibration(
    browser: Any, service_process: Callable[..., Any], free_port: Callable[[], int]
) -> None:
    port = free_port()
    process, url = service_process(resolve_model("mnist"), port=port)
    visitor = Visit(browser, url)
    visitor.use_sample("Digit 3")
    process.terminate()
    process.wait()
    service_process(resolve_model("cifar10"), port=port)
    with visitor.page.expect_response("**/calibration"):
        visitor.page.get_by_role("button", name="Digit 4", exact=True).click()
    visitor.page.locator("#model-line", has_text="cifar10").wait_for()
    visitor.page.wait_for_selector("#scores svg")
    assert visitor.page.inner_text("#label") not in "0123456789"
    assert not visitor.page.is_visible("#error")
    assert not visitor.page.is_visible("#pad")


def test_a_phone_shows_a_photo_model_without_scrolling_sideways(visit: Callable[..., Visit]) -> None:
    visitor = visit(resolve_model("cifar10"), viewport={"width": 390, "height": 844})
    visitor.use_sample("Coloured noise")
    assert not visitor.page.is_visible("#pad")
    assert visitor.page.evaluate("document.documentElement.scrollWidth") == 390
    assert visitor.violations() == []
    visitor.check()


def test_many_classes_show_the_leading_ones(visit: Callable[..., Visit], many_classes_bundle: Any) -> None:
    visitor = visit(many_classes_bundle.path)
    visitor.use_sample("Gradient")
    assert visitor.page.locator("#alpha li").count() == 10
    assert "140 more are not shown" in visitor.page.inner_text("#precision")
    visitor.check()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_command_sends_the_saved_image(visit: Callable[..., Visit], tmp_path: Path) -> None:
    visitor = visit(resolve_model("mnist"))
    visitor.use_sample("Digit 3")
    _save_and_run(visitor.page, tmp_path)
    pixels = (tmp_path / "digit-3.png").read_bytes()
    name = "it's $(touch odd).png"
    files = [{"name": name, "mimeType": "image/png", "buffer": pixels}]
    with visitor.page.expect_response(lambda reply: "predict" in reply.url):
        visitor.page.set_input_files("#file", files)
    visitor.page.locator("#curl", has_text="odd").wait_for()
    (tmp_path / name).write_bytes(pixels)  # such a name may be changed by the browser when it saves the file
    _run(visitor.page, tmp_path)
    assert not (tmp_path / "odd").exists()
    visitor.check()


def _save_and_run(page: Any, folder: Path) -> None:
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(folder / download.value.suggested_filename)
    _run(page, folder)


def _run(page: Any, folder: Path) -> None:
    """Run the command of the page in a shell, and compare its result with the one that is shown."""
    command = ["sh", "-c", page.inner_text("#curl")]
    reply = json.loads(subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout)
    assert reply["results"][0]["prediction"]["label"] == page.inner_text("#label") == "3"


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_files_can_be_dropped_and_pasted(visit: Callable[..., Visit], kind: str) -> None:
    visitor = visit(resolve_model("mnist"))
    page = visitor.page
    page.wait_for_selector("#samples img[src]")
    script = """async (kind) => {
        const blob = await (await fetch("page/digit-7.png")).blob();
        const data = new DataTransfer();
        data.items.add(new File([blob], "seven.png", { type: "image/png" }));
        const event = kind === "drop"
            ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
        document.body.dispatchEvent(event);
    }"""
    with page.expect_response(lambda reply: "predict" in reply.url):
        page.evaluate(script, kind)
    page.wait_for_selector("#result:not([hidden])")
    assert page.inner_text("#label") == "7"
    visitor.check()


def test_of_several_models_one_can_be_selected(visit: Callable[..., Visit]) -> None:
    visitor = visit(resolve_model("mnist"))
    page = visitor.page
    assert not page.is_visible("#model")

    def add_model(route: Any) -> None:
        listed = route.fetch().json()["models"]
        route.fulfill(json={"models": [*listed, {**listed[0], "name": "second"}]})

    page.route("**/models", add_model)
    page.reload()
    page.wait_for_selector("#model", state="visible")
    page.select_option("#model", "second")
    assert "second" in page.inner_text("#model-line")
    with page.expect_request("**/models/second/predict?*"):
        page.get_by_role("button", name="Digit 3", exact=True).click()
    page.wait_for_selector("#error:not([hidden])")  # this service has no such model


def test_the_page_asks_for_a_key_and_keeps_it_in_memory_only(
    browser: Any, service_process: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    token = add_key(tmp_path / "keys", lambda digest: Key("visitor", digest))
    _, url = service_process(resolve_model("demo"), keys_file=tmp_path / "keys")
    visit = Visit(browser, url)
    visit.page.get_by_label("API key").fill("wrong")
    visit.page.get_by_role("button", name="Use this key").click()
    visit.page.wait_for_selector("#error:not([hidden])")
    visit.page.get_by_label("API key").fill(token)
    visit.page.get_by_role("button", name="Use this key").click()
    visit.page.wait_for_selector("#key-form", state="hidden")
    visit.page.wait_for_selector("#samples button img")
    assert visit.violations() == []
    stored = visit.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )
    assert token not in stored
    assert token not in visit.page.content()
    visit.page.reload()
    visit.page.wait_for_selector("#key-form:not([hidden])")
