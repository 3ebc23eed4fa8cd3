"""Load onnxruntime-gpu on a machine without CUDA: to read its kernels, and to see where it places the nodes of a graph.

Neither needs a GPU, but the CUDA provider does not load without the CUDA libraries, nor start without a device. So each
function that it imports from them is replaced by a stub that reports success, and its memory is the CPU's. Sessions can be
opened then, which includes the placement of nodes; they cannot be run. This needs Linux, gcc and g++.

To add a release to the table of kernels, download its wheel for this Python and run this module:

    pip download onnxruntime-gpu==X.Y.Z --no-deps --dest wheels
    python -m qualms_training.gpu.wheels wheels
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from qualms.files import write_bytes
from qualms_training.errors import DataError
from qualms_training.gpu.kernels import FILE, OLDEST_OPSET

NAME = re.compile(r"onnxruntime_gpu-(\d+\.\d+\.\d+)-.*\.whl")
SKIPPED = re.compile("Sequence|Random|RNN$|GRU$|LSTM$|If$|Loop$|Scan$|NonMaxSuppression$")
"""operators that the table leaves out: sequences, random numbers, recurrent networks and control flow"""
OPEN = 2**31 - 1
"""the last version in a registration without an end"""

_STUBS = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { *n = 1; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int *n) { *n = 0; return 0; }",
    "cudaMalloc": "int cudaMalloc(void **p, size_t n) { *p = malloc(n + 256); return 0; }",
    "cudaMallocHost": "int cudaMallocHost(void **p, size_t n) { *p = malloc(n + 256); return 0; }",
    "cudaHostAlloc": "int cudaHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n + 256); return 0; }",
    "cudaMemcpy": "int cudaMemcpy(void *a, void *b, size_t n, int k) { memcpy(a, b, n); return 0; }",
    "cudaMemcpyAsync": "int cudaMemcpyAsync(void *a, void *b, size_t n, int k, void *s) { memcpy(a, b, n); return 0; }",
    "cudaMemGetInfo": "int cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = 8ul << 30; return 0; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "stub"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "stub"; }',
    "cudnnGetErrorString": 'const char *cudnnGetErrorString(int e) { return "stub"; }',
    "cudnnGetVersion": "size_t cudnnGetVersion(void) { return 91000; }",
    "__cudaRegisterFatBinary": "void **__cudaRegisterFatBinary(void *f) { static void *h[8]; return h; }",
}
_PROPERTIES = """int {name}(char *p, int d) {{
  memset(p, 0, 900); *(size_t *)(p + 288) = 8ul << 30; *(size_t *)(p + 296) = 49152; *(int *)(p + 308) = 32;
  *(int *)(p + 320) = 1024; *(int *)(p + 360) = 8; return 0;
}}"""  # memory, shared memory, warp size, threads per block and compute capability, at their offsets in cudaDeviceProp

_TENSORRT = """
#include <dlfcn.h>
#include <memory>
#include <string>
struct Factory;
struct Provider {  // the head of onnxruntime::Provider, core/providers/shared_library/provider_interfaces.h
  virtual std::shared_ptr<Factory> CreateExecutionProviderFactory(const void *) = 0;
  virtual std::shared_ptr<Factory> CreateExecutionProviderFactory(int) = 0;
  virtual void *a() { return nullptr; } virtual void *b() { return nullptr; } virtual void *c() { return nullptr; }
  virtual void *d() { return nullptr; } virtual void *e() { return nullptr; } virtual void *f() { return nullptr; }
};
static std::shared_ptr<Factory> cuda() {
  Dl_info info;
  dladdr((void *)&cuda, &info);
  std::string path(info.dli_fname);
  path = path.substr(0, path.rfind('/')) + "/libonnxruntime_providers_cuda.so";
  static char options[1024];
  auto get = (Provider * (*)()) dlsym(dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD), "GetProvider");
  return get()->CreateExecutionProviderFactory((const void *)options);
}
struct Cuda : Provider {
  std::shared_ptr<Factory> CreateExecutionProviderFactory(const void *) override { return cuda(); }
  std::shared_ptr<Factory> CreateExecutionProviderFactory(int) override { return cuda(); }
};
extern "C" Provider *GetProvider() { static Cuda provider; return &provider; }
"""
"""ONNX Runtime lists the kernels of every provider or of none, so TensorRT's is replaced by one that returns CUDA's."""

_LIST_KERNELS = """
import json
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def, get_all_operator_schema
kernels = [k for k in get_all_opkernel_def() if (k.provider, k.domain) == ("CUDAExecutionProvider", "")]
schemas = [[s.name, s.since_version] for s in get_all_operator_schema() if s.domain == ""]
print(json.dumps([[[k.op_name, *k.version_range, k.type_constraints] for k in kernels], schemas]))
"""
_OPEN_SESSION = """
import sys
import onnxruntime as ort
for strict in "01":
    options = ort.SessionOptions()
    options.log_severity_level = 3 * int(strict)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", strict)
    providers = ["CUDAExecutionProvider"] if strict == "1" else ["CUDAExecutionProvider", "CPUExecutionProvider"]
    try:
        ort.InferenceSession(sys.argv[1], options, providers=providers)
        print("opened", strict)
    except Exception as error:
        print("refused", strict, error)
"""
Row = tuple[str, int, int | None, tuple[tuple[str, frozenset[str]], ...]]
"""operator, first and last version, accepted types by constraint"""


@dataclass(frozen=True)
class Opened:
    """How a release placed the nodes of a graph."""

    on_cpu: int
    on_cuda: int
    """without the copies between the devices"""
    accepted: bool
    """whether a session that may not use the CPU was opened"""


@dataclass(frozen=True)
class Wheel:
    """An unpacked wheel with stubs in place of CUDA."""

    release: str
    folder: Path

    def kernels(self) -> list[Row]:
        """The CUDA kernels that a graph of OLDEST_OPSET or newer can use; types that may vary together in one row."""
        kernels, schemas = json.loads(self._python(_LIST_KERNELS).splitlines()[-1])
        versions: dict[str, list[int]] = defaultdict(list)
        for name, version in schemas:
            versions[name].append(version)
        kinds: dict[tuple[str, int, int | None], set[tuple[tuple[str, frozenset[str]], ...]]] = defaultdict(set)
        for name, first, last, constraints in kernels:
            oldest = max((version for version in versions[name] if version <= OLDEST_OPSET), default=0)
            types = {
                key: frozenset(t[7:-1] for t in names if t.startswith("tensor(")) for key, names in constraints.items()
            }
            if onnx.defs.has(name) and last >= oldest and all(types.values()) and not SKIPPED.search(name):
                kinds[name, first, None if last == OPEN else last].add(tuple(sorted(types.items())))
        return [(*key, types) for key, several in kinds.items() for types in _merged(several)]

    def open(self, graph: bytes) -> Opened:
        """Place the nodes of a graph."""
        with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
            file.write(graph)
            file.flush()
            log = self._python(_OPEN_SESSION, file.name)
        counts = {"CPU": 0, "CUDA": 0}
        for device, count in re.findall(r"placed on \[(CPU|CUDA)ExecutionProvider\]. Number of nodes: (\d+)", log):
            counts[device] = int(count)
        copies = len(re.findall(r"\] *Memcpy(?:From|To)Host \(Memcpy", log))
        if refusal := re.search("^refused 0 (.*)", log, re.M):
            raise DataError(f"onnxruntime-gpu {self.release} cannot open the graph: {refusal[1]}")
        return Opened(counts["CPU"], counts["CUDA"] - copies, "opened 1" in log)

    def _python(self, code: str, *arguments: str) -> str:
        """Standard output and error of a program that imports this wheel's onnxruntime."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "LD_LIBRARY_PATH": str(self.folder / "stubs")}
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise DataError(
                f"onnxruntime-gpu {self.release} cannot be loaded: {done.stdout.strip().splitlines()[-1:]}."
            )
        return done.stdout


def wheel_files(folder: Path) -> dict[str, Path]:
    """The wheels of onnxruntime-gpu in a folder by release, oldest first."""
    files = {match[1]: path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    if not files:
        raise DataError(f"{folder} contains no wheel of onnxruntime-gpu.")
    return dict(sorted(files.items(), key=lambda item: version_key(item[0])))


def version_key(release: str) -> tuple[int, ...]:
    """Sorts releases by age."""
    return tuple(int(part) for part in release.split("."))


@contextmanager
def unpacked(release: str, file: Path) -> Iterator[Wheel]:
    """Unpack a wheel into a temporary folder and put the stubs in place."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder)
        _make_stubs(folder)
        yield Wheel(release, folder)


def _make_stubs(folder: Path) -> None:
    libraries = folder / "onnxruntime" / "capi"
    provider = libraries / "libonnxruntime_providers_cuda.so"
    needed = re.findall(r"\[(lib(?:cu|nv)[^\]]+)\]", _output("readelf", "-d", str(provider)))
    symbols = re.findall(r"^ +[Uw] (\w+)(?:@+(\S+))?$", _output("nm", "-D", "--undefined-only", str(provider)), re.M)
    stubs = folder / "stubs"
    stubs.mkdir()
    for library in needed:
        names = {name for name, version in symbols if version == library}
        if library.startswith("libcuda."):  # the driver's symbols have no version
            names |= {name for name, version in symbols if not version and re.match(r"cu[A-Z]", name)}
        source = "#include <stdlib.h>\n#include <string.h>\n" + "\n".join(_stub(name) for name in sorted(names))
        script = stubs / "versions"
        script.write_text(("" if library.startswith("libcuda.") else library) + " { global: *; };")
        _compile("c", source, stubs / library, f"-Wl,-soname,{library}", f"-Wl,--version-script={script}")
    _compile("c++", _TENSORRT, libraries / "libonnxruntime_providers_tensorrt.so", "-ldl")


def _stub(name: str) -> str:
    if name.startswith("cudaGetDeviceProperties"):
        return _PROPERTIES.format(name=name)
    if "Create" in name:
        return f"long {name}(void **p) {{ *p = calloc(1, 256); return 0; }}"
    return _STUBS.get(name, f"long {name}(void) {{ return 0; }}")


def _compile(language: str, source: str, target: Path, *arguments: str) -> None:
    command = ["gcc" if language == "c" else "g++", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(target)]
    subprocess.run([*command, "-x", language, "-", *arguments], input=source, text=True, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _merged(kinds: set[tuple[tuple[str, frozenset[str]], ...]]) -> set[tuple[tuple[str, frozenset[str]], ...]]:
    """Unite kernels that differ in the types of one constraint only, until none do."""
    for first in sorted(kinds, key=str):
        for second in kinds - {first}:
            same_names = [name for name, _ in first] == [name for name, _ in second]
            if same_names and sum(a != b for (_, a), (_, b) in zip(first, second, strict=True)) == 1:
                united = tuple((name, a | b) for (name, a), (_, b) in zip(first, second, strict=True))
                return _merged(kinds - {first, second} | {united})
    return kinds


def extended(table: dict[str, Any], release: str, kernels: Sequence[Row]) -> dict[str, Any]:
    """The table of kernels with one more release, which must be newer than all others."""
    newest = table["releases"][-1] if table["releases"] else "0"
    if version_key(release) <= version_key(newest):
        raise DataError(f"Release {release} is older than {newest}, the newest of the table; add releases in order.")
    present = {
        (operator, first, last, json.dumps({name: " ".join(sorted(types)) for name, types in constraints}))
        for operator, first, last, constraints in kernels
    }
    rows = []
    for operator, first, last, types, since, until in table["kernels"]:
        key = (operator, first, last, json.dumps(types))
        continues = until == newest and key in present
        rows.append([operator, first, last, types, since, release if continues else until])
        present -= {key} if continues else set()
    rows += [[operator, first, last, json.loads(types), release, release] for operator, first, last, types in present]
    order = sorted(rows, key=lambda row: (*row[:2], row[2] or OPEN, version_key(row[4]), json.dumps(row[3])))
    return table | {"releases": [*table["releases"], release], "kernels": order}


def write_table(table: dict[str, Any], path: Path) -> None:
    """Write the table with one kernel per line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in table.items() if key != "kernels"]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["kernels"])
    write_bytes(path, "\n".join(["{", *lines, '  "kernels": [', rows, "  ]", "}", ""]).encode())


def main(folder: str) -> None:
    """Add the releases in a folder of wheels to the table."""
    path = Path(__file__).with_name(FILE)
    table = json.loads(path.read_text())
    for release, file in wheel_files(Path(folder)).items():
        if release not in table["releases"]:
            with unpacked(release, file) as wheel:
                table = extended(table, release, wheel.kernels())
    write_table(table, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
