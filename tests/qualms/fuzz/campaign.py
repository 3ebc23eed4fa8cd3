"""A fuzz campaign against `qualms serve` on loopback: raw HTTP, bodies of predictions, or image files.

    python -m tests.qualms.fuzz.campaign --cases 1000000 --kind http --report http.md
    python -m tests.qualms.fuzz.campaign --cases 1000000 --kind bodies --report bodies.md
    python -m tests.qualms.fuzz.campaign --cases 200000 --kind images --report images.md

Several connections send one case after the other and stay open as long as the service keeps them. `judge.py` checks each case,
and at the end the service's counters, memory and log are checked. The exit code is 1 if anything was violated.
`--only NUMBER` repeats one case and prints all that was sent and received.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop
from pydantic import ValidationError
from tests.qualms.fuzz.body_cases import MAX_BODY_BYTES, MAX_PIXELS, body_case
from tests.qualms.fuzz.case import Case
from tests.qualms.fuzz.exchange import Connection, Outcome, exchange
from tests.qualms.fuzz.http_cases import http_case
from tests.qualms.fuzz.image_cases import image_case
from tests.qualms.fuzz.judge import Judge, Verdict
from tests.qualms.fuzz.report import Results, to_markdown
from tests.qualms.fuzz.service import HOST, Service, running_service

from qualms.replies import PredictReply

CONNECTIONS = 8
CASE_SECONDS = 4.0
"""a connection must be answered or closed within this time"""
GROWTH = 64 * 2**20
"""maximal difference in bytes of the memory in the last tenth of the campaign and after its first tenth"""
_SAMPLES = 200
_SETTLE_SECONDS = 5.0

Make = Callable[[int, int], Case]
MAKES: dict[str, Make] = {"http": http_case, "bodies": body_case, "images": image_case}
SETTINGS = {"max_pixels": MAX_PIXELS, "max_body_bytes": MAX_BODY_BYTES}
"""settings of the service"""


def check_prediction(body: bytes) -> str | None:
    """The error of a prediction's body."""
    try:
        PredictReply.model_validate_json(body)
    except ValidationError as error:
        return f"the prediction does not have its documented form: {error.errors()[0]['type']}"
    return None


class Campaign:
    """Runs cases on several connections at once."""

    def __init__(self, service: Service, cases: Iterator[Case], count: int, seconds: float) -> None:
        self._service, self._cases, self._count = service, cases, count
        self._end = time.monotonic() + seconds
        self._judge = Judge(MAX_BODY_BYTES, check_prediction)
        self._connections: set[Connection] = set()
        self.results = Results()

    async def run(self, on_progress: Callable[[Results], None] = lambda _: None) -> Results:
        """Run all cases, or as many as the time allows."""
        started, before = time.monotonic(), self._service.counts()
        self._on_progress = on_progress
        self.results.memory.append(self._service.memory())
        watch = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._run_cases() for _ in range(CONNECTIONS)))
        watch.cancel()
        self.results.seconds = time.monotonic() - started
        await self._finish()
        if self._service.process.poll() is not None:
            return self.results
        self.results.counted = self._service.counts()
        self.results.counted.subtract(before)
        self.results.counted["metrics", 200] -= 1  # the request that read `before`
        self.results.compare_counters()
        self.results.killed_workers = self._service.killed_workers()
        if not self._service.is_ready():
            self.results.add_violation("the service is not ready after the last case", "/readyz")
        return self.results

    async def _run_cases(self) -> None:
        connection: Connection | None = None
        for case in self._cases:
            if time.monotonic() > self._end or self._service.process.poll() is not None:
                break
            if connection is None or connection.ended or connection.transport.is_closing():
                connection = await self._connect()
            connection.deadline = time.monotonic() + CASE_SECONDS
            outcome = await exchange(connection, case)
            self._add(case, outcome)
            if connection.transport.is_closing():
                self._connections.discard(connection)
        if connection is not None:
            connection.close()

    def _add(self, case: Case, outcome: Outcome) -> None:
        results = self.results
        results.add(case, outcome, self._judge(case, outcome))
        if results.cases % max(1, self._count // _SAMPLES) == 0:
            results.memory.append(self._service.memory())
            self._on_progress(results)

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, self._service.port)
        self._connections.add(connection)
        return connection

    async def _watch(self) -> None:
        """Stop waiting on connections whose time is over."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            for connection in self._connections:
                if now > connection.deadline:
                    connection.overdue = True
                    connection.wake()

    async def _finish(self) -> None:
        """Check the state of the service after the last case."""
        results, process = self.results, self._service.process
        if process.poll() is not None:
            results.add_violation("the service has ended", f"exit code {process.returncode}")
            return
        results.memory.append(self._service.memory())
        if results.leak > GROWTH:
            results.add_violation("memory grows", f"{results.leak / 2**20:.0f} MiB after the first tenth")
        results.library_lines = self._service.library_lines()
        for line in self._service.log_errors():
            results.add_violation("errors in the log", line[:1000].replace("|", "\\x7c"))
        await asyncio.sleep(min(_SETTLE_SECONDS, results.seconds / 10))  # abandoned predictions are still running


def run(
    service: Service,
    kind: str,
    cases: int,
    *,
    seed: int = 0,
    seconds: float = 1e9,
    on_progress: Callable[[Results], None] = lambda _: None,
) -> Results:
    """Run a campaign of one kind against a service."""
    make = MAKES[kind]
    source = (make(seed, number) for number in range(cases))
    return uvloop.run(Campaign(service, source, cases, seconds).run(on_progress))


def repeat(service: Service, case: Case) -> tuple[Outcome, Verdict]:
    """Run one case on a new connection."""

    async def whole() -> Outcome:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, service.port)
        asyncio.get_running_loop().call_later(CASE_SECONDS, _give_up, connection)
        return await exchange(connection, case)

    outcome = uvloop.run(whole())
    return outcome, Judge(MAX_BODY_BYTES, check_prediction)(case, outcome)


def _give_up(connection: Connection) -> None:
    connection.overdue = True
    connection.wake()


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fuzz the service.")
    parser.add_argument("--kind", choices=MAKES, default="http")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=7200.0, help="maximal duration")
    parser.add_argument("--model", help="path or name of a model; by default the embedded one")
    parser.add_argument("--report", type=Path, help="file for the result in Markdown")
    parser.add_argument("--only", type=int, help="repeat this case only")
    options = parser.parse_args(arguments)
    with running_service(options.model, **SETTINGS) as service:
        if options.only is not None:
            case = MAKES[options.kind](options.seed, options.only)
            outcome, verdict = repeat(service, case)
            print(*case.pieces(), case.ending, *outcome.replies, outcome, verdict, sep="\n")
            return 1 if verdict.violations else 0
        progress = _Progress(options.cases)
        results = run(
            service, options.kind, options.cases, seed=options.seed, seconds=options.seconds, on_progress=progress
        )
    command = (
        f"python -m tests.qualms.fuzz.campaign --kind {options.kind} --cases {options.cases} --seed {options.seed}"
    )
    text = to_markdown(f"Fuzz campaign: {options.kind}", results).replace("\n\n", f"\n\n`{command}`\n\n", 1)
    if options.report:
        options.report.write_text(text)
    print(text)
    return 1 if results.violations else 0


class _Progress:
    """Prints a line every few seconds."""

    def __init__(self, cases: int) -> None:
        self._cases, self._started, self._next = cases, time.monotonic(), itertools.count(0, 10)
        self._due = next(self._next)

    def __call__(self, results: Results) -> None:
        elapsed = time.monotonic() - self._started
        if elapsed < self._due:
            return
        while self._due <= elapsed:
            self._due = next(self._next)
        violations = sum(category.count for category in results.violations.values())
        memory = results.memory[-1] / 2**20
        line = f"{results.cases}/{self._cases} cases, {results.cases / elapsed:.0f}/s, {memory:.0f} MiB, {violations} violations"
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
