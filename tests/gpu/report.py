"""Everything that needs a GPU, in order of value: ``nox -s gpu``, or ``python -m tests.gpu`` beside torch.

Nothing is downloaded: the environment must have torch for the GPU, and kvtier, kvtier-testing and
kvtier-bench from this tree. Steps whose other needs are missing are skipped by name. The figures go into one
JSON document; ``--docs`` writes the document's steps into the tables of docs/devices.md. A table there
begins with ``<!-- gpu: STEP -->``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier_bench.engine.compared import PLAIN
from tests.gpu.first_token import PLACES, SPECS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "devices.md"
PYTEST = (sys.executable, "-m", "pytest", "-q", "--timeout", "120", "-m", "device", "-p", "no:cacheprovider")
EXAMPLE = ROOT / "examples" / "transformers_prefix_cache"
SUITES = ("conformance", "transformers", "sanitizer")  # steps that only pass or fail
WAYS = ("store", "load", "both")
KVTIER = (sys.executable, "-m", "kvtier")


@dataclass(frozen=True)
class Step:
    """One command, and how to read its output.

    Attributes:
        needs: required modules and programs; without them the step is skipped.
        limit_s: seconds after which the step counts as hung.
        read: extracts the document's figures from the output.
        gib: required GiB of device memory; with less the step is skipped.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    limit_s: float
    read: Callable[[str], Any]
    gib: int = 0


def steps(root: Path, device: str) -> list[Step]:
    """Return all steps; ``root`` is a new folder for files, ``device`` torch's type of the GPU."""
    example = (sys.executable, str(EXAMPLE), str(root), "--device", device, "--model", "8b")
    options = ("--tokens", "16384", "--memory", "8GiB")
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all")
    kernel = ("-k", "kernel", "tests/unit/device/test_gpu.py")
    versus = ("bench", "versus", "--model", "8b", "--only", "speed", "--rounds", "3", "--json")
    return [
        Step("conformance", (*PYTEST, "tests/unit/device"), ("pytest", "hypothesis"), 400, counts),
        Step(
            "first_token",
            (sys.executable, "-m", "tests.gpu.first_token", "--systems", *SPECS),
            ("vllm",),
            400,
            json.loads,
            gib=60,
        ),
        Step(
            "conversations",
            (sys.executable, "-m", "tests.gpu.conversations"),
            ("vllm",),
            400,
            json.loads,
            gib=60,
        ),
        Step("stress", (sys.executable, "-m", "tests.gpu.stress"), ("vllm",), 300, json.loads),
        Step("engine", (*KVTIER, "demo", "--json"), ("vllm",), 300, json.loads),
        Step("copies", (*KVTIER, "bench", "device", "--json"), ("kvtier_bench",), 300, json.loads),
        Step(
            "transformers",
            (*PYTEST, "tests/integration/test_transformers_example.py"),
            ("pytest", "transformers"),
            120,
            counts,
        ),
        Step("prefill", (*example, *options), ("transformers",), 200, first_tokens, gib=60),
        Step("sanitizer", (*sanitizer, *PYTEST, *kernel), ("compute-sanitizer", "triton"), 300, counts),
        Step("versus", (*KVTIER, *versus), ("vllm",), 600, json.loads, gib=75),
    ]


def counts(text: str) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's last line."""
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}


def first_tokens(text: str) -> dict[str, float]:
    """Return the seconds to the first token, by the place of the KV."""
    return {name.strip(): float(s) for name, s in re.findall(r"^(\S[\w ]+?) +(\d+\.\d+)", text, re.MULTILINE)}


def run(step: Step) -> dict[str, Any]:
    """Run a step; return its result, or the reason for its absence."""
    missing = [name for name in step.needs if not (importlib.util.find_spec(name) or shutil.which(name))]
    if missing:
        return {"skipped": f"{', '.join(missing)} not found"}
    if step.gib and _memory_gib() < step.gib:
        return {"skipped": f"the GPU has {_memory_gib()} GiB, this needs {step.gib}"}
    began_s, pipe = time.monotonic(), subprocess.PIPE
    with subprocess.Popen(
        step.command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        problem = None
        try:
            printed, errors = process.communicate(timeout=step.limit_s)
        except subprocess.TimeoutExpired:
            problem = f"hung: not over after {step.limit_s:g} s"
            os.killpg(process.pid, signal.SIGKILL)  # and its children, which hold the pipes
            printed, errors = process.communicate()
    ended = {"seconds": round(time.monotonic() - began_s, 1)}
    if problem or process.returncode:
        problem = problem or f"status {process.returncode}"
        return {**ended, "failed": problem, "output": (printed + errors)[-4000:]}
    return {**ended, "result": step.read(printed)}


def _memory_gib() -> int:
    device = torch.accelerator.current_accelerator()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory) >> 30


def with_figures(page: str, found: dict[str, Any]) -> str:
    """Return the page with new tables for the steps that have a result, or failed."""
    machine = f"{found['machine']['device']}; a machine with {found['machine']['cores']} processor cores."
    texts = {"machine": [machine]}
    ran = {name: it for name, it in found.items() if name != "machine" and "skipped" not in it}
    texts |= {
        name: FIGURES[name](it["result"]) if "result" in it else [outcome(it)]
        for name, it in ran.items()
        if name in FIGURES
    }
    if suites := [[name, outcome(ran[name])] for name in SUITES if name in ran]:
        texts["suites"] = _table(["suite", "outcome"], suites)
    for name, lines in texts.items():
        before, found_text, after = page.partition(f"<!-- gpu: {name} -->\n")
        assert found_text, f"the page has no place for {name}"
        page = "\n".join(
            [f"{before}{found_text}", *lines, "", f"<!-- end -->{after.partition('<!-- end -->')[2]}"]
        )
    return page


def outcome(it: dict[str, Any]) -> str:
    """Return a step's outcome: counts of tests, its seconds, or the reason why there are no figures."""
    if "failed" in it:
        return f"failed: {it['failed']}"
    counted = [
        f"{n} {word}" for word, n in it["result"].items() if n and word in ("passed", "failed", "skipped")
    ]
    return ", ".join(counted) or f"passed in {it['seconds']:.0f} s"


def _copies(result: dict[str, Any]) -> list[str]:
    """Return the tables of copies by page size, and of the compute throughput lost meanwhile."""
    rows, losses = (
        [],
        {(it["page_kib"], it["way"], it["work"]): it["percent"] for it in result["ComputeLoss"]},
    )
    for kib, pages in dict.fromkeys((it["page_kib"], it["pages"]) for it in result["CopySpeed"]):
        ways = [it for it in result["CopySpeed"] if (it["page_kib"], it["pages"]) == (kib, pages)]
        speeds = [f"{it['gb_s']:.1f} ({it['percent']:.0f} %)" for it in ways]
        rows.append([f"{kib} KiB", f"{pages:,}", *speeds, f"{ways[1]['host_us']:.0f}"])
    columns = [(way, work) for way in WAYS[:2] for work in ("prefill", "decode")]
    lost = (
        [f"{kib} KiB", *(f"{losses[kib, way, work]:.0f} %" for way, work in columns)]
        for kib in dict.fromkeys(kib for kib, _, _ in losses)
    )
    return [
        *_table(["page", "pages", *(f"{way}, GB/s (of the limit)" for way in WAYS), "host, µs"], rows),
        "",
        *_table(["page", *(f"{work} beside {way}s" for way, work in columns)], lost),
    ]


def _prefill(result: dict[str, float]) -> list[str]:
    rows = ([name, f"{seconds:.2f}"] for name, seconds in result.items())
    return _table(["first token after 16,384 tokens, a model of 8B", "s"], rows)


def _engine(result: dict[str, Any]) -> list[str]:
    """Return the table of ``kvtier demo``."""
    sources = (("computed",), ("from_cpu", "from_adopted"), ("from_fs",))
    rows = (
        [
            it["phase"],
            f"{it['ttft_ms']:.0f}",
            *(f"{sum(it[name] for name in names):,}" for names in sources),
            f"{it['speed_up']:.1f}",
            "yes" if it["identical"] else "**no**",
        ]
        for it in result["Phase"]
    )
    columns = ["vLLM", "TTFT, ms", "tokens computed", "from host memory", "from files", "speed-up"]
    return _table([*columns, "tokens identical"], rows)


def _first_token(result: dict[str, Any]) -> list[str]:
    """Return a row for each length and system: milliseconds, and the speed-up over computing."""
    found = {(it["tokens"], it["system"], it["place"]): it for it in result["FirstToken"]}
    keys = dict.fromkeys((tokens, system) for tokens, system, _ in sorted(found, key=lambda it: it[0]))

    def cell(tokens: int, system: str, place: str) -> str:
        if (it := found.get((tokens, system, place))) is None:
            return ""
        speed_up = "" if place == "computed" else f" ({it['speed_up']:.1f}x)"
        return f"{it['ttft_ms']:.1f}{speed_up}" + ("" if it["identical"] else ", **other tokens**")

    rows = (
        [f"{tokens:,}", system, *(cell(tokens, system, place) for place in PLACES)] for tokens, system in keys
    )
    return _table(["tokens", "system", *(f"{place}, ms" for place in PLACES)], rows)


def _conversations(result: dict[str, Any]) -> list[str]:
    """Return a row for each system, with the gain of a later turn over an engine without a cache."""
    base_s = next(it["turn_s"] for it in result["Conversations"] if it["system"] == PLAIN)
    rows = (
        [
            it["system"],
            f"{it['first_s']:.1f}",
            f"{it['turn_s']:.1f} ({base_s / it['turn_s']:.1f}x)",
            it["cached"],
            f"{it['ready_s']:.1f}",
            f"{it['pinned_s']:.1f}",
            f"{it['stop_s']:.1f}",
        ]
        for it in result["Conversations"]
    )
    times = ["engine ready, s", "then page-locked, s", "shutdown, s"]
    return _table(["system", "first turn, s", "later turn, s", "tokens not computed", *times], rows)


def _stress(result: dict[str, Any]) -> list[str]:
    """Return the table of answers that differ from the control's."""
    rows = (
        [it["round"], str(it["answers"]), str(it["differ"]), f"{it['gap']:.3f}"] for it in result["Compared"]
    )
    counts = "; ".join(
        f"{name}: " + ", ".join(f"{value:,.0f} {what}" for what, value in of.items())
        for name, of in result["counts"].items()
    )
    return [*_table(["round", "answers", "differ", "gap of log-probabilities"], rows), "", f"{counts}."]


def _versus(result: dict[str, Any]) -> list[str]:
    """Return the table of ``kvtier bench versus``, including the rows in which kvtier is behind."""
    rows = (
        [it["measure"], it["system"], f"{it['value']:,.4g}", f"{it['ratio']:.2f}" if it["ratio"] else ""]
        for it in result["Speed"]
    )
    return _table(["measure", "system", "median", "ratio to kvtier, or to none"], rows)


FIGURES: dict[str, Callable[[Any], list[str]]] = {
    "first_token": _first_token,
    "conversations": _conversations,
    "stress": _stress,
    "copies": _copies,
    "prefill": _prefill,
    "engine": _engine,
    "versus": _versus,
}


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def main() -> None:
    """Run the named steps, or all; exit with status 1 if one failed, or if none could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help="names of steps [all]")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the document [gpu.json]")
    parser.add_argument("--docs", action="store_true", help="run nothing: write docs/devices.md from --json")
    args = parser.parse_args()
    if args.docs:
        PAGE.write_text(with_figures(PAGE.read_text(), json.loads(args.json.read_text())))
        return
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("torch finds no GPU; docs/devices.md says what to install")
    name = torch.get_device_module(device).get_device_name()
    found: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "device": name}}
    with tempfile.TemporaryDirectory() as root:
        for step in steps(Path(root), device.type):
            if not args.steps or step.name in args.steps:
                found[step.name] = run(step)
                print(step.name, json.dumps(found[step.name])[:300], flush=True)
                args.json.write_text(json.dumps(found, indent=1))
    if any("failed" in it for it in found.values()) or not any("result" in it for it in found.values()):
        raise SystemExit(1)
