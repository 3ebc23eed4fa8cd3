import io
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from qualms.bench import comparison
from qualms.bench.load.sample_images import draw_colour_pngs
from qualms.bench.servers import instructions
from qualms.bench.servers.instructions import (
    Callgrind,
    Instructions,
    InstructionsRow,
    Perf,
    count_instructions,
    find_callgrind,
    find_perf,
    parse_callgrind,
    parse_perf,
)
from qualms.bench.servers.processes import BenchError
from qualms.bench.tables import print_instructions

CALLGRIND = """\
version: 1
creator: callgrind-3.19.0
positions: line
events: Ir
summary: 1182

ob=(1) /usr/lib/libpython3.so
fl=(1) ceval.c
fn=(1) eval
12 100
+3 20
cob=(2) /site-packages/onnxruntime/capi/pybind.so
cfi=(2) ???
cfn=(2) Run
calls=3 0
* 1000
-1 1

ob=(2)
fl=(2)
fn=(2)
0 1000

ob=(3) /site-packages/PIL/_imaging.so
fn=(3) decode
0 40
ob=(4) /site-packages/pillow.libs/libz.so
fn=(4) inflate
0 7
ob=(5) /site-packages/simplejpeg/_jpeg.so
fn=(5) decompress
0 5
ob=(6) /site-packages/pyspng/_pyspng_c.so
fn=(6) spng
0 6
ob=(1)
fn=(1)
* 3
totals: 1182
"""


def test_callgrind_costs_are_summed_by_library_without_those_of_called_functions() -> None:
    counted = parse_callgrind(CALLGRIND.splitlines(keepends=True))
    assert counted == Instructions(1182, 1000, 58)
    assert counted.rest == 124
    assert counted.per(2) == Instructions(591, 500, 29)


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("123456,,instructions:u,3010,100.00,,\n", 123456),
        ("a warning\n123,,instructions:u,3010,100.00,,\n", 123),
        ("<not supported>,,instructions:u,0,100.00,,\n", None),
        ("<not counted>,,instructions:u,0,100.00,,\n", None),
        ("Error: no permission\n", None),
        ("", None),
    ],
)
def test_the_output_of_perf_is_parsed(output: str, count: int | None) -> None:
    assert parse_perf(output) == count


def test_perf_is_used_only_if_the_machine_has_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(stderr="12,,instructions:u,3010,100.00,,\n")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert isinstance(find_perf(), Perf)
    done.stderr = "<not supported>,,instructions:u,0,100.00,,\n"
    assert find_perf() is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert (find_perf(), find_callgrind()) == (None, None)


def test_perf_counts_while_the_load_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script in place of perf: it runs the command after "--" and then prints a count.
    fake = tmp_path / "perf"
    fake.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\n"$@"\necho 900,,instructions:u,1,1,, >&2\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(instructions, "_PERF", (str(fake),))
    assert Perf()._count(1, lambda: 3) == Instructions(300)
    fake.write_text("#!/bin/sh\necho no permission >&2\n")
    with pytest.raises(BenchError, match="perf counted no instructions of process 1: no permission"):
        Perf()._count(1, lambda: 3)


def printed(*rows: InstructionsRow) -> str:
    file = io.StringIO()
    print_instructions(rows, "callgrind", Console(file=file, width=80))
    return file.getvalue()


def test_the_table_has_the_parts_that_the_tool_attributes() -> None:
    text = printed(InstructionsRow(8, Instructions(5e5, 3e5, 1e5), Instructions(1e6, 3e5, 1e5)))
    assert ["8", "qualms", "500.0", "0.50", "300.0", "100.0", "100.0", "0.17"] in map(str.split, text.splitlines())
    assert ["plain", "1,000.0", "300.0", "100.0", "600.0"] in map(str.split, text.splitlines())
    assert max(map(len, text.splitlines())) <= 80
    text = printed(InstructionsRow(8, Instructions(5e5), Instructions(1e6)))
    assert ["8", "qualms", "500.0", "0.50"] in map(str.split, text.splitlines())
    assert "decoders" not in text


def test_one_sentence_replaces_the_table_if_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for requested in (True, False):
        console = Console(file=io.StringIO(), width=200)
        comparison._count("model.onnx", [], [1], requested, console)
        assert isinstance(console.file, io.StringIO)
        assert ("Instructions are not counted" in console.file.getvalue()) is requested


def test_a_running_service_is_not_counted() -> None:
    with pytest.raises(BenchError, match="--instructions starts its own service"):
        comparison.compare("http://127.0.0.1:8000", instructions=True)


@pytest.mark.slow
@pytest.mark.skipif(find_callgrind() is None, reason="valgrind is not installed")
def test_callgrind_counts_both_servers(bundle_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "_MIN_REQUESTS", 16)
    counted: Any = count_instructions(str(bundle_file), draw_colour_pngs(4), [2], Callgrind())
    (row,) = counted
    for server in (row.ours, row.plain):
        assert min(server.inference, server.decode, server.rest) > 0
        assert server.total == pytest.approx(server.inference + server.decode + server.rest)
