"""Build of the native library: a hatchling build hook, and ``python -m kvtier._native.build`` in place.

The library depends neither on Python's version nor on its ABI, so one wheel for each platform is
enough. Without a compiler the wheel is pure: it has no file tier.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    _Hook = BuildHookInterface[Any]
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface as _Hook
    except ImportError:  # building in place needs no hatchling
        _Hook = object

SOURCE = "kvtier_native.c"
SOURCES = (SOURCE, "index.c", "pool.c", "scan.c")
HEADERS = ("kvtier_native.h",)
LIBRARY = "libkvtier_native.so"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-fvisibility=default")


class BuildError(Exception):
    """The library cannot be compiled here. The message is the reason."""


def compiler() -> list[str]:
    """Return the command of a C compiler: ``$CC``, or the first of cc, gcc and clang. BuildError if none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C compiler (tried $CC, cc, gcc, clang)")


def compile_library(folder: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile the library next to its sources and return its path. BuildError if that fails.

    A complete library replaces the old one, which processes that have loaded it keep.
    """
    target = folder / LIBRARY
    building = target.with_name(f"{LIBRARY}.{os.getpid()}")
    sources = [str(folder / name) for name in SOURCES]
    command = [*compiler(), *FLAGS, *extra_flags, "-o", str(building), *sources]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        building.unlink(missing_ok=True)
        raise BuildError(f"{command[0]} ended with {done.returncode}:\n{done.stderr.strip()}")
    building.replace(target)
    return target


class CustomBuildHook(_Hook):
    """Compiles the library into wheels and editable installs; if that fails, the wheel is pure."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as made for this platform. Called by hatchling."""
        del version
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "kvtier" / "_native"
        try:
            library = compile_library(folder)
        except BuildError as error:
            self.app.display_warning(f"the native library, which the file tier needs, is not built: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{library.relative_to(self.root).as_posix()}")


def main() -> int:
    """Build in place, strictly: warnings of the compiler are errors."""
    try:
        strict = ("-Werror", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")  # as Ubuntu's compiler has it
        print(compile_library(Path(__file__).parent, strict))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
