"""``kvtier simulate``: its replay against a naive LRU, every policy against the optimum, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvtier._cli.main import app
from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey
from kvtier.policies import ARC, LHD, LRU, Auto, EvictionPolicy
from kvtier_bench.simulate.replay import device_hits, optimum, replay
from kvtier_bench.simulate.trace import sample

prompts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=40)
some = hypothesis.settings(max_examples=100, deadline=None)


def naive_lru(requests: list[list[OffloadKey]], capacity: int) -> list[int]:
    """Return the chunks that each request loads: a list, the least recently used one first."""
    held: list[OffloadKey] = []
    found = []
    for keys in requests:
        hits = 0
        while hits < len(keys) and keys[hits] in held:
            hits += 1
        found.append(hits)
        loaded, behind = keys[:hits], [key for key in keys[hits:] if key in held]
        new = [key for key in keys if key not in held]
        others = [key for key in held if key not in keys]
        short = max(0, len(held) + len(new) - capacity)
        evicted = min(short, len(others))
        new = new[: len(new) - (short - evicted)]
        held = others[evicted:] + loaded[::-1] + behind[::-1] + new[::-1]
    return found


@some
@hypothesis.given(prompts, st.integers(1, 15))
def test_lru_is_a_naive_lru(ids: list[list[int]], capacity: int) -> None:
    requests = sample(ids).requests
    nothing = [0] * len(requests)
    found = [loaded for loaded, _ in replay(LRU(), requests, nothing, capacity)]
    assert found == naive_lru(requests, capacity)


@pytest.mark.parametrize("policy", [LRU, ARC, LHD, Auto])
@some
@hypothesis.given(ids=prompts, capacity=st.integers(1, 15), device=st.integers(0, 6))
def test_no_policy_beats_the_optimum(
    policy: type[EvictionPolicy], ids: list[list[int]], capacity: int, device: int
) -> None:
    requests = sample(ids).requests
    hits = device_hits(requests, device)
    loaded = sum(loaded for loaded, _ in replay(policy(), requests, hits, capacity))
    assert loaded <= optimum(requests, hits, capacity)


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output + str(result.exception or "")


def test_the_command_reads_a_trace_and_says_how_far_a_policy_is_from_the_optimum(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n{"hash_ids": ["a"]}\n{"hash_ids": [1, 2]}\n')
    status, text = simulate(
        str(path), "--policy", "lru", "--capacity", "128MiB", "--capacity", "100%", "--json"
    )
    assert status == 0, text
    rows = json.loads(text)["Simulated"]
    found = {(row["policy"], row["slots"]): (row["hit_rate"], row["of_optimum"]) for row in rows}
    assert found == {
        ("lru", 2): (0.2, 0.5),
        ("optimum", 2): (0.4, 1.0),
        ("lru", 3): (0.4, 1.0),
        ("optimum", 3): (0.4, 1.0),
    }


def refused(*arguments: str) -> str:
    """Return the words with which the command ends; the command line shows those of a KVTierError."""
    error = CliRunner().invoke(app, ["simulate", *arguments]).exception
    assert isinstance(error, KVTierError), error
    return str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.jsonl"], "absent.jsonl: no such file; name one, or a generated trace: agents"),
        (["heads", "--policy", "lur"], "did you mean"),
        (["heads", "--capacity", "much"], "--capacity much: write a number of bytes"),
        (["heads", "--capacity", "x%"], "--capacity x%: write a number of bytes"),
        (["heads", "--capacity", "-5%"], "a share of the trace's chunks: 10%, at most 1000%"),
        (["heads", "--capacity", "inf%"], "--capacity inf%: "),
        (["heads", "--capacity", "nan%"], "--capacity nan%: "),
        (["heads", "--device", "1e300%"], "--device 1e300%: "),
        (["heads", "--chunk-bytes", "0"], "--chunk-bytes 0: must be at least 1 byte"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments, "--requests", "50")


@pytest.mark.parametrize(
    "line", [b'{"ids": [2]}', b'{"hash_ids": ["\xff"]}', b'{"hash_ids": ["\\ud800x"]}', b"[]"]
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"hash_ids": [1]}\n \r\n' + line)  # neither BOM nor blank line is wrong
    assert f"{path}, line 3: " in (text := refused(str(path)))
    assert '"hash_ids", a list of numbers or strings' in text


@pytest.mark.parametrize("text", ["", "\n", '{"hash_ids": []}\n'])
def test_a_trace_without_chunks_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert f"{path} has no chunks to simulate" in refused(str(path))
