"""Results of a campaign: counts, violations and documented differences by category, each with an example, as Markdown."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tests.qualms.fuzz.case import Case
from tests.qualms.fuzz.exchange import Outcome
from tests.qualms.fuzz.judge import Verdict
from tests.qualms.fuzz.service import Counts

_MAX_BYTES = 160


@dataclass
class Category:
    """Cases with the same finding."""

    count: int = 0
    example: str = ""


@dataclass
class Results:
    """Everything that a campaign has found."""

    kinds: Counter[str] = field(default_factory=Counter)
    answered: Counts = field(default_factory=Counter)
    counted: Counts = field(default_factory=Counter)
    """replies by the service's metrics"""
    unread: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)
    """resident memory of the service and its workers in bytes, sampled after equal numbers of cases"""
    killed_workers: Counter[str] = field(default_factory=Counter)
    """worker processes that the service has killed, by reason"""
    library_lines: int = 0
    """messages of C libraries in the log"""
    violations: dict[str, Category] = field(default_factory=dict)
    differences: dict[str, Category] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        """Number of cases."""
        return self.kinds.total()

    def add(self, case: Case, outcome: Outcome, verdict: Verdict) -> None:
        """Add one case."""
        self.kinds[case.kind] += 1
        self.answered.update(verdict.answered)
        self.unread += verdict.unread
        for table, names in ((self.violations, verdict.violations), (self.differences, verdict.differences)):
            for name in names:
                self._count(table, name, lambda: describe(case, outcome))

    def add_violation(self, name: str, example: str) -> None:
        """Add a finding that belongs to no single case."""
        self._count(self.violations, name, lambda: example)

    def _count(self, table: dict[str, Category], name: str, example: Callable[[], str]) -> None:
        category = table.setdefault(name, Category())
        category.count += 1
        if not category.example:
            category.example = example()

    @property
    def growth(self) -> int:
        """Growth of the service's memory in bytes after the first tenth of the campaign."""
        warm = self.memory[len(self.memory) // 10 :]
        return max(warm) - warm[0] if warm else 0

    @property
    def leak(self) -> float:
        """Memory in bytes in the last tenth of the campaign minus that in the second tenth, medians."""
        tenth = max(1, len(self.memory) // 10)
        return median(self.memory[-tenth:]) - median(self.memory[tenth : 2 * tenth] or self.memory)

    def compare_counters(self) -> None:
        """Compare the service's counters with the replies that the client received."""
        surplus = 0
        for key in sorted(self.counted.keys() | self.answered.keys()):
            more = self.counted[key] - self.answered[key]
            surplus += max(0, more)
            if more < 0:
                self.add_violation(
                    f"qualms_requests_total{{route={key[0]!r}, code={key[1]}}} is too small",
                    f"{self.counted[key]} counted, {self.answered[key]} received",
                )
        if surplus > self.unread:
            rows = {key: count - self.answered[key] for key, count in self.counted.items()}
            most = ", ".join(f"{key}: {more}" for key, more in sorted(rows.items()) if more > 0)
            text = f"{surplus} more than received, at most {self.unread} expected: {most}"
            self.add_violation("qualms_requests_total is too large", text)


def describe(case: Case, outcome: Outcome) -> str:
    """A case and its replies in one line."""
    statuses = ", ".join(str(reply.status) for reply in outcome.replies) or "none"
    end = "overdue" if outcome.overdue else "reset" if outcome.reset else "closed" if outcome.closed else "open"
    read = f"{outcome.stream.complete} requests, {outcome.stream.end}"
    return f"case {case.number} ({case.kind}, {case.ending}): `{shorten(case.data)}` → {statuses}, {end}; h11: {read}"


def shorten(data: bytes) -> str:
    """The bytes as a literal without the characters that end a cell or a code span of Markdown."""
    text = repr(data if len(data) <= _MAX_BYTES else data[:_MAX_BYTES]) + ("" if len(data) <= _MAX_BYTES else "…")
    return text.replace("|", "\\x7c").replace("`", "\\x60")


def to_markdown(title: str, results: Results) -> str:
    """The report."""
    rate = results.cases / results.seconds if results.seconds else 0.0
    memory = [f"{size / 2**20:.0f}" for size in (results.memory[0], max(results.memory), results.memory[-1])]
    lines = [
        f"# {title}",
        "",
        f"{results.cases} cases in {results.seconds:.0f} s, {rate:.0f} per second. {results.answered.total()} replies received, "
        f"{results.counted.total()} counted by the service.",
        f"Resident memory of the service and its workers: {memory[0]} MiB at the start, at most {memory[1]} MiB, "
        f"{memory[2]} MiB at the end; "
        f"growth after the first tenth: {results.growth / 2**20:.1f} MiB, from the second to the last tenth: "
        f"{results.leak / 2**20:.1f} MiB.",
        f"Worker processes killed: {_counts(results.killed_workers)}. Messages of C libraries: {results.library_lines}.",
        "",
        "## Violations",
        "",
        *_table(results.violations, "None."),
        "",
        "## Documented differences from h11",
        "",
        *_table(results.differences, "None."),
        "",
        "## Replies",
        "",
        "| route | status | received | counted by the service |",
        "|---|---|---|---|",
    ]
    for route, code in sorted(results.answered.keys() | {key for key, count in results.counted.items() if count}):
        lines.append(f"| {route} | {code} | {results.answered[route, code]} | {results.counted[route, code]} |")
    lines += ["", "## Cases", "", "| kind | cases |", "|---|---|"]
    lines += [f"| {kind} | {count} |" for kind, count in sorted(results.kinds.items())]
    return "\n".join(lines) + "\n"


def _counts(numbers: Counter[str]) -> str:
    named = ", ".join(f"{number} ({name})" for name, number in sorted(numbers.items()) if number)
    return named or "none"


def _table(table: dict[str, Category], empty: str) -> list[str]:
    if not table:
        return [empty]
    rows = sorted(table.items(), key=lambda item: -item[1].count)
    return ["| category | cases | example |", "|---|---|---|"] + [
        f"| {name} | {category.count} | {category.example} |" for name, category in rows
    ]
