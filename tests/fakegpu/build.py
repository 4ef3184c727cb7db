"""The fake GPU's libraries, compiled for the CUDA build of torch in this environment.

    python -m tests.fakegpu.build FOLDER COMMAND ...

compiles them to a folder and runs a command with the fake GPU. ``environment`` returns the variables for it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = {
    "libcudart.so.13": ("runtime.c", "streams.c"),
    "libcublas.so.13": ("blas.c",),
    "libcublasLt.so.13": ("blas.c",),
    "libcuda.so.1": ("driver.c",),
    "libnvidia-ml.so.1": ("nvml.c",),
}
"""Each library and its sources, in load order."""

_DRIVER = re.compile(
    r"\bcu(?:Mem|Ctx|Device|Func|Module|Launch|Tensor|Multicast|Stream|Event|Occup)[A-Z]?[A-Za-z0-9_]+"
)
_DEFINED = re.compile(r"^API [\w\s*]*?\b(\w+)\(", re.MULTILINE)
_NAMES = {
    "libcudart.so.13": re.compile(r"(__)?cuda[A-Z]\w*"),
    "libcuda.so.1": re.compile(r"cu(?!File)[A-Z]\w*"),
}
_OF_BLAS = re.compile(r"cublas\w+")


def build(folder: Path) -> None:
    """Compile the libraries to a folder. Functions that they do not define return 0, which means success."""
    site = _site()
    cuda = site / "nvidia" / "cu13"
    needed = _symbols("--undefined-only", (site / "torch" / "lib").glob("*.so"))
    triton = (site / "triton" / "backends" / "nvidia" / "driver.c").read_text()
    torch = (site / "torch" / "include" / "c10" / "cuda" / "driver_api.h").read_text()
    names = {
        "libcudart.so.13": needed | _exports(cuda, "libcudart.so.13"),
        "libcuda.so.1": needed | set(_DRIVER.findall(triton + torch)),
        "libcublas.so.13": _exports(cuda, "libcublas.so.13"),
        "libcublasLt.so.13": _exports(cuda, "libcublasLt.so.13"),
        "libnvidia-ml.so.1": set[str](),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for library, sources in SOURCES.items():
        text = "".join((HERE / source).read_text() for source in sources)
        known = {*_DEFINED.findall(text), *(name for name in names[library] if name.endswith("_t"))}
        rest = set(filter(_NAMES.get(library, _OF_BLAS).fullmatch, names[library] - known))
        _compile(folder / library, sources, rest, cuda / "include")


def _compile(library: Path, sources: Iterable[str], rest: Iterable[str], include: Path) -> None:
    stubs = library.with_suffix(".c")
    stubs.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(rest)))
    versions = library.with_suffix(".map")
    versions.write_text(f"{library.name if library.suffix == '.13' else 'FAKE'} {{ global: *; }};\n")
    options: tuple[str, ...] = (
        *("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"),
        *("-Wl,-z,defs", f"-Wl,-soname,{library.name}"),
    )
    if library.suffix == ".13":  # torch looks for symbols of this version
        options += (f"-Wl,--version-script={versions}",)
    folders = (f"-I{include}", f"-I{HERE}")
    needs = (library.with_name("libcudart.so.13"),) if library.name == "libcuda.so.1" else ()
    command = ("cc", *options, *folders, "-o", library, *(HERE / name for name in sources), stubs, *needs)
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)


def _site() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("torch is not installed")
    return Path(found.origin).parents[1]


def _exports(cuda: Path, library: str) -> set[str]:
    return _symbols("--defined-only", [cuda / "lib" / library])


def _symbols(which: str, libraries: Iterable[Path]) -> set[str]:
    command = ["nm", "-D", which, *map(str, libraries)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}


def environment(folder: Path, order: str = "late") -> dict[str, str]:
    """Return the variables that make programs find the fake GPU; keep the ones already set."""
    paths = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(HERE / "site")}
    joined = {
        name: os.pathsep.join(filter(None, (path, os.environ.get(name)))) for name, path in paths.items()
    }
    preloaded = [str(folder / name) for name in SOURCES if name != "libnvidia-ml.so.1"]
    return {
        **joined,
        "LD_PRELOAD": " ".join(preloaded),
        "KVTIER_FAKE_ORDER": order,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    build(target)
    order = os.environ.get("KVTIER_FAKE_ORDER", "late")
    sys.exit(subprocess.run(sys.argv[2:], env={**os.environ, **environment(target, order)}).returncode)
