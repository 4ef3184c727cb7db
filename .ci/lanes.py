"""Run sessions of nox two at a time: ``python .ci/lanes.py [--full] [SESSION ...]``.

Sessions that share an environment run one after the other. A session's output is printed whole when it ends.
The log ends with a table of durations and results. The exit status is 1 if a session failed. A run waits
until other runs in the same checkout have ended, because it would remove environments in use.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]

# Sessions by the environment that they can share, because engines and torch are large. They start in this
# order, as far as their environments are free.
FAST = {
    "demo": "engine",
    "integration": "engine",
    "differential": "engine",
    "contract": "engine",
    "lint": "checks",
    "types": "checks",
    "architecture": "checks",
    "docs": "checks",
    "bare": "bare",
    "plugins-3.11": "plugins-3.11",
    "sglang": "sglang",
    "sim": "torch",
    "tests": "torch",
    "conformance-3.11": "conformance-3.11",
}
"""The sessions that every commit runs."""

_LATER = [f"{name}-{python}" for name in ("plugins", "conformance") for python in ("3.12", "3.13")]
FULL = {
    **FAST,
    "generations": "engine",
    "oldest": "oldest",
    "native": "native",
    "fakegpu": "fakegpu",
    "fuzz": "fuzz",
    "wheels": "wheels",
    **{name: name for name in _LATER},
}
"""Everything."""

LANES = 2
LIMIT_S = {"fast": 3600, "full": 4500}
GRACE_S = 30.0
POLL_S = 0.2
LAST_LINES = 25  # lines of a failed session's log, repeated at the end
# Failures of a failed session's tests, printed last, because log viewers cut the middle of a long log.
FIRST_RED = 8
LINE_CHARS = 300

OF_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the variables that are the same for uv, which does not read them."""

_printing = threading.Lock()
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(r"^=+ (.* in [0-9.]+s.*?) =+$", re.MULTILINE)
_RED = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)
# Raised exceptions. Those in a group are framed.
_ERROR = re.compile(r"^E  .*$|^ +\| (?:\w+\.)*\w*(?:Error|Exception|Warning): .*$", re.MULTILINE)


_ended = threading.Event()  # set when this run is interrupted


@dataclass
class Job:
    """One session of nox.

    Args:
        name: name of the session.
        owner: session whose environment it uses: the first of those that can share it.
        folder: directory for its log and its report.
    """

    name: str
    owner: str
    folder: Path
    seconds: float = 0.0
    result: str = "did not run"
    summaries: Sequence[str] = ()

    @property
    def has_failed(self) -> bool:
        """Whether it neither passed nor was skipped."""
        return self.result not in ("passed", "skipped")

    def run(self, limit_s: float, variables: Mapping[str, str], lock: int) -> None:
        """Run it in its own process group, in its owner's environment if that exists.

        It inherits the lock, and still holds it if this process is killed.
        """
        print(f"---- {self.name}: started", flush=True)
        if _folder(self.owner).exists() and not _folder(self.name).exists():
            _folder(self.name).symlink_to(_folder(self.owner))
        report = self.folder / f"{self.name}.json"
        command = [sys.executable, "-m", "nox", "-s", self.name, "--report", str(report)]
        environment = {**os.environ, **variables}
        started_s = time.monotonic()
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
            )
        while (status := process.poll()) is None and time.monotonic() < started_s + limit_s:
            if _ended.wait(POLL_S):
                break
        self.seconds = time.monotonic() - started_s
        if status is None:
            _stop(process)
            self.result = f"ENDED after its limit of {limit_s:.0f} s"
        else:
            self.result = f"FAILED ({status})" if status else _reported(report)
        log_text = self.log()
        self.summaries = _SUMMARY.findall(log_text)
        with _printing:
            print(f"\n==== nox -s {self.name} ====\n{log_text}", end="")
            print(f"---- {self.name}: {self.result} in {self.seconds:.0f} s\n", flush=True)

    def log(self) -> str:
        """Return its output without colours."""
        return _COLOUR.sub("", self._log.read_text(encoding="utf-8", errors="replace"))

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.name}.log"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a session and its processes. SIGINT comes first, so that pytest names the running test."""
    for number, patience_s in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def _reported(report: Path) -> str:
    """Return "passed" or "skipped", because nox exits with 0 in both cases."""
    sessions = json.loads(report.read_text(encoding="utf-8"))["sessions"]
    return "passed" if any(one["result"] == "success" for one in sessions) else "skipped"


def run(jobs: Sequence[Job], limit_s: float, variables: Mapping[str, str]) -> None:
    """Run all jobs, one at a time in each environment, and remove the environments made here."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.owner, []).append(job)
    with _locked() as lock, ThreadPoolExecutor(LANES) as pool:

        def run_group(group: Sequence[Job]) -> None:
            new = [_folder(job.name) for job in group if not _folder(job.name).exists()]
            for job in group:
                if not _ended.is_set():
                    job.run(limit_s, variables, lock)
            for folder in new:
                _remove(folder)

        try:
            for future in [pool.submit(run_group, group) for group in groups.values()]:
                future.result()
        except BaseException:
            _ended.set()
            raise


@contextmanager
def _locked() -> Iterator[int]:
    """Hold the lock on the environments; yield its descriptor. Waits while another run holds it."""
    folder = PROJECT / ".nox"
    folder.mkdir(exist_ok=True)
    with (folder / "lanes.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another run uses the environments in {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _folder(name: str) -> Path:
    """Return the path of a session's nox environment."""
    return PROJECT / ".nox" / name.replace(".", "-")


def _remove(folder: Path) -> None:
    """Remove an environment or a link to one. A folder that is still being written stays."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def conclude(jobs: Sequence[Job], seconds: float) -> None:
    """Print the ends of the failed logs, the table, and the first failures of each session."""
    for job in jobs:
        if job.has_failed:
            print(f"\n==== the end of nox -s {job.name} ====")
            print(*job.log().splitlines()[-LAST_LINES:], sep="\n")
    print("\n==== sessions ====")
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        print(f"{job.name:{width}} {job.seconds:5.0f} s  {job.result:9} {'; '.join(job.summaries)}".rstrip())
    print(f"{'all':{width}} {seconds:5.0f} s")
    if failed := [job for job in jobs if job.has_failed]:
        for job in failed:
            log = job.log()
            red, errors = _RED.findall(log), _ERROR.findall(log)
            print(f"\n{job.name}: {len(red)} failed tests; the first ones, and the first errors:")
            print(*(line[:LINE_CHARS] for line in (*red[:FIRST_RED], *errors[:FIRST_RED])), sep="\n")
        print(f"\nfailed: {' '.join(job.name for job in failed)}")


def uv_settings() -> dict[str, str]:
    """Return variables that make nox use uv if it is installed, and give uv pip's settings."""
    command = (sys.executable, "-m", "pip", "config", "list")
    listed = subprocess.run(command, capture_output=True, text=True).stdout  # empty without pip
    # Compile bytecode, as pip does. If Python writes no bytecode, each process would compile its imports.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": "1"}
    found["NOX_DEFAULT_VENV_BACKEND"] = "uv|virtualenv"
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        if (variable := OF_UV.get(name.rpartition(".")[2])) is not None:
            found[variable] = " ".join(str(ast.literal_eval(value)).split())
    return {name: value for name, value in found.items() if name not in os.environ}


def chosen(names: Collection[str], *, full: bool) -> dict[str, str]:
    """Return each chosen session and its environment's owner.

    ``plugins`` selects that session on all Pythons.
    """
    known = {name: {one for one in FULL if name in (one, one.partition("-")[0])} for name in names}
    if missing := [name for name in names if not known[name]]:
        sys.exit(f"no session {', '.join(missing)}; there are: {', '.join(FULL)}")
    wanted = set().union(*known.values()) or set(FULL if full else FAST)
    owners: dict[str, str] = {}
    return {one: owners.setdefault(environment, one) for one, environment in FULL.items() if one in wanted}


def main() -> None:
    """Run the sessions named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also run the sessions that commits skip")
    parser.add_argument("sessions", nargs="*", help="names of sessions [all]")
    arguments = parser.parse_args()
    sessions = chosen(arguments.sessions, full=arguments.full)
    variables = {**uv_settings(), **({"KVTIER_TESTS": "full"} if arguments.full else {})}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-lanes-") as folder:
        jobs = [Job(name, owner, Path(folder)) for name, owner in sessions.items()]
        try:
            run(jobs, LIMIT_S["full" if arguments.full else "fast"], variables)
        finally:
            conclude(jobs, time.monotonic() - started_s)
    sys.exit(any(job.has_failed for job in jobs))


if __name__ == "__main__":
    main()
