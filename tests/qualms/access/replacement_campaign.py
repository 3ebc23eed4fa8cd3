"""Replace keys and certificates under load, and count the failed requests of valid clients.

    python -m tests.qualms.access.replacement_campaign --seconds 30

A service with keys and TLS answers clients that hold a key which is never removed, over connections that are kept open and over new
ones. Meanwhile other keys are added and removed, the certificate is replaced, and broken files are written in between. The exit
code is 1 if a request of a valid client fails, or if nothing was replaced.
"""

import argparse
import asyncio
import itertools
import os
import ssl
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import httpx

from qualms.access.keys import Key
from qualms.access.keys_file import add_key, remove_key
from qualms.bench.servers.processes import free_port
from qualms.files import write_bytes

_STEP_SECONDS = 0.7
_CLIENTS = 8


def make_certificate(folder: Path, name: str) -> tuple[bytes, bytes]:
    """A self-signed certificate and its key."""
    certificate, key = folder / f"{name}.cert", folder / f"{name}.key"
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", *options, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate.read_bytes(), key.read_bytes()


class Load:
    """Clients that send requests until they are stopped."""

    def __init__(self, url: str, token: str, trusted: Path) -> None:
        self.url, self.headers, self.trusted = url, {"x-api-key": token}, trusted
        self.good, self.failures, self.stopped = 0, list[str](), False

    async def run(self, *, keep: bool) -> None:
        """Send one request after the other, over one connection or over a new one each."""
        while not self.stopped:
            context = ssl.create_default_context(cafile=self.trusted)
            async with httpx.AsyncClient(verify=context, trust_env=False, timeout=60) as client:
                while not self.stopped:
                    try:
                        reply = await client.get(f"{self.url}/models", headers=self.headers)
                    except httpx.HTTPError as error:
                        self.failures.append(repr(error))
                    else:
                        if reply.status_code == 200:
                            self.good += 1
                        else:
                            self.failures.append(reply.text)
                    if not keep:
                        break


async def replace_files(folder: Path, certificates: list[tuple[bytes, bytes]], seconds: float) -> int:
    """Replace keys and certificates until the time is over; returns how often."""
    end = time.monotonic() + seconds
    for count, (certificate, key) in enumerate(itertools.cycle(certificates), 1):
        if time.monotonic() > end:
            return count - 1
        await asyncio.to_thread(add_key, folder / "keys", partial(Key, f"other-{count}"))
        write_bytes(folder / "cert.pem", certificate)  # does not fit the key until the next step
        await asyncio.sleep(_STEP_SECONDS)
        write_bytes(folder / "key.pem", key)
        if count > 1:
            await asyncio.to_thread(remove_key, folder / "keys", f"other-{count - 1}")
        if count % 3 == 0:
            content = (folder / "keys").read_bytes()
            write_bytes(folder / "keys", b"this is not a key\n")
            await asyncio.sleep(2 * _STEP_SECONDS)
            write_bytes(folder / "keys", content)
        await asyncio.sleep(2 * _STEP_SECONDS)
    raise AssertionError("not reached")


async def run(folder: Path, seconds: float) -> int:
    """Run the campaign; returns the exit code."""
    token = add_key(folder / "keys", lambda digest: Key("valid", digest))
    first, second = make_certificate(folder, "first"), make_certificate(folder, "second")
    for name, content in zip(("cert.pem", "key.pem"), first, strict=True):
        write_bytes(folder / name, content)
    (folder / "trusted.pem").write_bytes(first[0] + second[0])
    port, management = free_port(), free_port()
    variables = {
        "QUALMS_KEYS_FILE": str(folder / "keys"),
        "QUALMS_TLS_CERT": str(folder / "cert.pem"),
        "QUALMS_TLS_KEY": str(folder / "key.pem"),
        "QUALMS_MANAGEMENT_PORT": str(management),
        "QUALMS_LOG_LEVEL": "error",
    }
    command = [sys.executable, "-m", "qualms", "serve", "demo", "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL) as process:
        try:
            await wait_until_ready(f"http://127.0.0.1:{management}/readyz")
            load = Load(f"https://127.0.0.1:{port}", token, folder / "trusted.pem")
            tasks = [asyncio.create_task(load.run(keep=number % 2 == 0)) for number in range(_CLIENTS)]
            replaced = await replace_files(folder, [second, first], seconds)
            load.stopped = True
            await asyncio.gather(*tasks)
            text = httpx.get(f"http://127.0.0.1:{management}/metrics", trust_env=False).text
        finally:
            process.terminate()
    reloads = [line for line in text.splitlines() if line.startswith("qualms_reloads_total")]
    print(f"{replaced} replacements; {load.good:,} answered, {len(load.failures)} failed", *load.failures[:5], sep="\n")
    print(*reloads, sep="\n")
    return int(bool(load.failures) or not replaced or not load.good)


async def wait_until_ready(url: str) -> None:
    """Wait for the service."""
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(180):
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


def main() -> None:
    """Run the campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(run(Path(folder), options.seconds)))


if __name__ == "__main__":
    main()
