"""No token and no digest appears in logs, metrics, replies, process lists or error output."""

import hashlib
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from qualms.access.keys import new_token
from qualms.client.sync_client import Client
from qualms.errors import QualmsError

Add = Callable[..., str]
QUALMS = Path(sysconfig.get_path("scripts")) / "qualms"


def test_nothing_secret_is_written_or_sent(
    service_process: Callable[..., tuple[Any, str]], keys_file: Path, add: Add, tmp_path: Path
) -> None:
    tokens = [add("right"), add("limited", rate=1e-4), add("reader", only=("read",)), new_token()]
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    process, url = service_process(keys_file=keys_file, log_level="debug")
    seen = []
    with httpx.Client(base_url=url, trust_env=False) as client:
        for token in tokens:
            for path in ("/models", "/unknown", "/metrics", "/docs", "/status"):
                for headers in ({"authorization": f"Bearer {token}"}, {"x-api-key": token}):
                    seen.append(client.get(path, headers=headers))
            seen.append(client.post("/predict", headers={"x-api-key": token}, content=b"not an image"))
            seen.append(client.post("/predict?score=x", headers={"authorization": f"Token {token}"}, content=b"x"))
        text = client.get("/metrics", headers={"x-api-key": tokens[0]}).text
    arguments = Path(f"/proc/{process.pid}/cmdline").read_text() if sys.platform == "linux" else ""
    process.send_signal(signal.SIGABRT)  # a crash, with Python's report if it is enabled
    _, errors = process.communicate(timeout=60)
    outputs = [text, arguments, errors, (tmp_path / "stdout").read_text()]
    outputs += [f"{response.headers} {response.text}" for response in seen]
    assert any("right" in output for output in outputs)
    for secret in (*tokens, *digests):
        assert not [output for output in outputs if secret in output or secret[-24:] in output]


def test_a_crash_while_a_key_is_checked_does_not_print_it(keys_file: Path, add: Add) -> None:
    """Tracebacks have lines of code, not values."""
    token = add("right")
    program = (
        "import sys; from pathlib import Path; from qualms.access.key_ring import KeyRing\n"
        "from qualms.access.keys_file import read_keys; from qualms.access.keys import Key\n"
        "ring = KeyRing(read_keys(Path(sys.argv[1])))\n"
        "ring._by_digest = None\n"
        "ring.find(sys.stdin.buffer.read())"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program, keys_file], input=token.encode(), capture_output=True, check=False
    )
    assert b"Traceback" in done.stderr
    assert token.encode() not in done.stderr + done.stdout
    assert hashlib.sha256(token.encode()).hexdigest().encode() not in done.stderr + done.stdout


def test_a_token_in_the_file_is_not_repeated_at_start(bundle_file: Path, tmp_path: Path) -> None:
    token = new_token()
    (tmp_path / "keys").write_text(f"app {token}\n")
    done = subprocess.run(
        [sys.executable, QUALMS, "serve", bundle_file],
        env={"PATH": str(shutil.which("env")), "QUALMS_KEYS_FILE": str(tmp_path / "keys"), "QUALMS_PORT": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qualms: Line 1 of ")
    assert token not in done.stderr


def test_the_client_shows_its_key_nowhere() -> None:
    token = new_token()
    with Client("http://127.0.0.1:9", api_key=token, retries=0) as client:
        assert token not in repr(client)
        with pytest.raises(QualmsError) as error:
            client.predict(b"\x89PNG")
        assert token not in f"{error.value!r} {error.value.__cause__!r}"
    with pytest.raises(QualmsError) as invalid:
        Client("http://127.0.0.1:9", api_key=f"{token}\nx")
    assert token not in str(invalid.value)


def test_no_command_takes_a_key_as_an_argument() -> None:
    done = subprocess.run(
        [sys.executable, QUALMS, "demo", "traffic", "--api-key", "x"], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"No such option" in done.stderr
