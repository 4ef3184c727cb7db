"""Everything that needs a GPU, in order of value: ``nox -s gpu``, or ``python -m tests.gpu`` beside torch.

Nothing is downloaded: it runs in an environment that has torch for the GPU, and kvtier, kvtier-testing and
kvtier-bench from this tree. What else is missing there is skipped by name. Writes one JSON document, from
which ``--docs`` makes the tables of docs/devices.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "devices.md"
PYTEST = (sys.executable, "-m", "pytest", "-q", "--timeout", "120", "-m", "device", "-p", "no:cacheprovider")
EXAMPLE = ROOT / "examples" / "transformers_prefix_cache"
BEGIN, END = "<!-- figures of a GPU -->\n", "<!-- end of the figures -->\n"
WAYS = ("store", "load", "both")
KVTIER = (sys.executable, "-m", "kvtier")


@dataclass(frozen=True)
class Step:
    """One command, and how to read what it prints.

    Attributes:
        needs: modules and programs without which it is skipped.
        limit_s: seconds after which it counts as hung.
        read: makes what goes into the document from what it prints.
        gib: GiB of device memory without which it is skipped.
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
        Step("engine", (*KVTIER, "demo", "--json"), ("vllm",), 300, json.loads),
        Step("versus", (*KVTIER, *versus), ("vllm",), 600, json.loads, gib=75),
    ]


def counts(text: str) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's last line."""
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}


def first_tokens(text: str) -> dict[str, float]:
    """Return the seconds to the first token, by where the KV came from."""
    return {name.strip(): float(s) for name, s in re.findall(r"^(\S[\w ]+?) +(\d+\.\d+)", text, re.MULTILINE)}


def run(step: Step) -> dict[str, Any]:
    """Run a step; return its result, or why there is none."""
    missing = [name for name in step.needs if not (importlib.util.find_spec(name) or shutil.which(name))]
    if missing:
        return {"skipped": f"{', '.join(missing)} not found"}
    if step.gib and _memory_gib() < step.gib:
        return {"skipped": f"the GPU has {_memory_gib()} GiB, this needs {step.gib}"}
    began_s = time.monotonic()
    try:
        done = subprocess.run(step.command, capture_output=True, text=True, timeout=step.limit_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"failed": f"not over after {step.limit_s:g} s"}
    ended = {"seconds": round(time.monotonic() - began_s, 1)}
    if done.returncode:
        return {**ended, "failed": f"status {done.returncode}", "output": (done.stdout + done.stderr)[-4000:]}
    return {**ended, "result": step.read(done.stdout)}


def _memory_gib() -> int:
    device = torch.accelerator.current_accelerator()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory) >> 30


def tables(found: dict[str, Any]) -> str:
    """Return the tables of the documentation: what ran, on what, and how fast copies were."""
    copies = found["copies"]["result"]
    cores, device = found["machine"]["cores"], copies["Machine"][0]["device"]
    lines = [f"{device}; a virtual machine with {cores} processor cores.", "", *_table("what", "outcome")]
    for name in ("conformance", "transformers", "sanitizer"):
        outcome = found[name].get("result", {})
        counted = ", ".join(f"{count} {word}" for word, count in outcome.items() if count)
        lines.append(f"| {name} | {counted or 'skipped: ' + found[name]['skipped']} |")
    lines += ["", *_table("page", "pages", *(f"{way}, GB/s (of the limit)" for way in WAYS), "host, µs")]
    for kib, pages in dict.fromkeys((it["page_kib"], it["pages"]) for it in copies["CopySpeed"]):
        of_size = [it for it in copies["CopySpeed"] if (it["page_kib"], it["pages"]) == (kib, pages)]
        speeds = [f"{it['gb_s']:.1f} ({it['percent']:.0f} %)" for it in of_size]
        lines.append(f"| {kib} KiB | {pages:,} | {' | '.join(speeds)} | {of_size[1]['host_us']:.0f} |")
    losses = {(it["page_kib"], it["way"], it["work"]): it["percent"] for it in copies["ComputeLoss"]}
    columns = [(way, work) for way in WAYS[:2] for work in ("prefill", "decode")]
    lines += ["", *_table("page", *(f"{work} beside {way}s" for way, work in columns))]
    for kib in dict.fromkeys(kib for kib, _, _ in losses):
        lost = (f"{losses[kib, way, work]:.0f} %" for way, work in columns)
        lines.append(f"| {kib} KiB | {' | '.join(lost)} |")
    if first := found["prefill"].get("result"):
        lines += ["", *_table("first token after 16,384 tokens, a model of 8B", "s")]
        lines += [f"| {name} | {seconds:.2f} |" for name, seconds in first.items()]
    return "\n".join(lines)


def _table(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def main() -> None:
    """Run the steps that are named, or all; fail where one failed, and where nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help="names of steps [all]")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the document [gpu.json]")
    parser.add_argument("--docs", action="store_true", help="run nothing: write docs/devices.md from --json")
    args = parser.parse_args()
    if args.docs:
        before, rest = PAGE.read_text().split(BEGIN, 1)
        text = tables(json.loads(args.json.read_text()))
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.split(END, 1)[1]}")
        return
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("torch finds no GPU; docs/devices.md says what to install")
    found: dict[str, Any] = {"machine": {"cores": os.cpu_count()}}
    with tempfile.TemporaryDirectory() as root:
        for step in steps(Path(root), device.type):
            if not args.steps or step.name in args.steps:
                found[step.name] = run(step)
                print(step.name, json.dumps(found[step.name])[:300], flush=True)
                args.json.write_text(json.dumps(found, indent=1))
    if any("failed" in it for it in found.values()) or not any("result" in it for it in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
