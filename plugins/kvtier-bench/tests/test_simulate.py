"""``kvtier simulate``: its replay against a naive LRU, policies against the optimum, and the command."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvtier._cli import app
from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey
from kvtier.policies import ARC, LHD, LRU, Auto, EvictionPolicy
from kvtier_bench.simulate import run
from kvtier_bench.simulate.files import replay_files
from kvtier_bench.simulate.generate import TRACES, generate
from kvtier_bench.simulate.replay import device_hits, optimum, replay
from kvtier_bench.simulate.trace import sample

prompts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=40)
some = hypothesis.settings(max_examples=100, deadline=None)


def naive_lru(requests: list[list[OffloadKey]], capacity: int) -> list[int]:
    """Return the number of chunks that each request loads. The cache is a list, least recently used first."""
    held: list[OffloadKey] = []
    found = []
    for keys in requests:
        hits = 0
        while hits < len(keys) and keys[hits] in held:
            hits += 1
        found.append(hits)
        new = [key for key in keys if key not in held]
        others = [key for key in held if key not in keys]
        short = max(0, len(held) + len(new) - capacity)
        evicted = min(short, len(others))
        new = new[: len(new) - (short - evicted)]
        held = others[evicted:] + [key for key in keys if key in held or key in new][::-1]
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
def test_optimum_is_never_beaten(
    policy: type[EvictionPolicy], ids: list[list[int]], capacity: int, device: int
) -> None:
    requests = sample(ids).requests
    hits = device_hits(requests, device)
    loaded = sum(loaded for loaded, _ in replay(policy(), requests, hits, capacity))
    assert loaded <= optimum(requests, hits, capacity)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(ids=prompts, capacity=st.integers(1, 15), device=st.integers(0, 6))
def test_files_do_not_beat_optimum(ids: list[list[int]], capacity: int, device: int) -> None:
    requests = sample(ids).requests
    hits = device_hits(requests, device)
    loaded = sum(loaded for loaded, _ in replay_files(requests, hits, capacity))
    assert loaded <= optimum(requests, hits, capacity)


@pytest.mark.parametrize(
    "name",
    ["scans", pytest.param("heads", marks=pytest.mark.full), pytest.param("loops", marks=pytest.mark.full)],
)
def test_returning_files_outlive_single_use(name: str) -> None:
    requests = sample(generate(name, 1500, 0)).requests
    nothing, capacity = [0] * len(requests), 200
    files = sum(loaded for loaded, _ in replay_files(requests, nothing, capacity))
    lru = sum(loaded for loaded, _ in replay(LRU(), requests, nothing, capacity))
    assert files > 1.2 * lru


@pytest.mark.parametrize(("capacity", "loaded"), [(1, 2), (2, 3), (3, 3)])
def test_optimum_keeps_next_used(capacity: int, loaded: int) -> None:
    """In a, b, c, a, b, a, only a is worth keeping with one slot, and b as well with two. c never is."""
    requests = sample([[1], [2], [3], [1], [2], [1]]).requests
    assert optimum(requests, [0] * 6, capacity) == loaded


def test_sample_keeps_all_uses() -> None:
    ids = list(generate("heads", 500, 1))
    whole, part = sample(ids), sample(ids, max_lookups=3000)
    assert whole.sampled == 1
    assert part.sampled > 1
    assert part.lookups == whole.lookups
    kept = {key for keys in part.requests for key in keys}
    assert part.requests == [[key for key in keys if key in kept] for keys in whole.requests]
    assert abs(part.unique / whole.unique - 1) < 0.2


@pytest.mark.parametrize("name", TRACES)
def test_seed_gives_one_trace(name: str) -> None:
    first, again, other = (list(generate(name, 50, seed)) for seed in (1, 1, 2))
    assert first == again != other


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output + str(result.exception or "")


def test_compares_policy_with_optimum(tmp_path: Path) -> None:
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
    """Return the command's error message; the command line shows it for a KVTierError."""
    error = CliRunner().invoke(app, ["simulate", *arguments]).exception
    assert isinstance(error, KVTierError), error
    return str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.jsonl"], "absent.jsonl: no such file; name one, or a generated trace: agents"),
        (["heads", "--policy", "lur"], "did you mean"),
        (["heads", "--capacity", "10"], "--capacity 10: holds no chunk of 67108864 bytes; add a unit"),
        (["heads", "--capacity", "much"], "--capacity much: write a number of bytes"),
        (["heads", "--capacity", "x%"], "--capacity x%: write a number of bytes"),
        (["heads", "--capacity", "-5%"], "a share of the trace's chunks: 10%, at most 1000%"),
        (["heads", "--capacity", "inf%"], "--capacity inf%: "),
        (["heads", "--capacity", "nan%"], "--capacity nan%: "),
        (["heads", "--device", "1e300%"], "--device 1e300%: "),
        (["heads", "--chunk-bytes", "0"], "--chunk-bytes 0: must be at least 1 byte"),
    ],
)
def test_wrong_argument_is_named(arguments: list[str], words: str) -> None:
    assert words in refused(*arguments, "--requests", "50")


@pytest.mark.parametrize(
    "line", [b'{"ids": [2]}', b'{"hash_ids": ["\xff"]}', b'{"hash_ids": ["\\ud800x"]}', b"[]"]
)
def test_invalid_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"hash_ids": [1]}\n \r\n' + line)  # A BOM and blank lines are allowed.
    assert f"{path}, line 3: " in (text := refused(str(path)))
    assert '"hash_ids", a list of numbers or strings' in text


@pytest.mark.parametrize("text", ["", "\n", '{"hash_ids": []}\n'])
def test_empty_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert f"{path} has no chunks to simulate" in refused(str(path))


def test_failing_policy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_worn.py").write_text(
        "from kvtier.policies import LRU\n"
        "class Worn(LRU):\n    def evict(self, count):\n        raise LookupError('worn out')\n"
    )
    metadata = tmp_path / "acme_worn-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-worn\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvtier.policies]\nacme-worn = acme_worn:Worn\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refused("heads", "--requests", "50", "--policy", "acme-worn", "--capacity", "1%")
    assert "--policy acme-worn: it raised LookupError: worn out" in said


def test_shared_prefix_hit_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 20 chunks out of 100. The sample contains fewer of them than its share."""
    monkeypatch.setattr(run, "sample", partial(sample, max_lookups=20_000))
    path, head = tmp_path / "trace.jsonl", [f"shared {number}" for number in range(20)]
    prompts = [head + [f"{request}, {number}" for number in range(80)] for request in range(300)]
    path.write_text("\n".join(json.dumps({"hash_ids": prompt}) for prompt in prompts))
    assert sample(prompts, 20_000).excess < -300
    capacities = "--capacity", "0%", "--capacity", "1%"
    for device, rates in [("0%", [0, 0, 0, 0.2, 0.2]), ("1%", [0.2, 0, 0, 0, 0])]:
        status, text = simulate(str(path), "--policy", "lru", *capacities, "--device", device, "--json")
        assert status == 0, text
        tables = json.loads(text)
        (source,) = tables["Source"]
        assert source["sampled"] == "1 in 2"
        found = [source["device_hit_rate"], *(row["hit_rate"] for row in tables["Simulated"])]
        assert found == pytest.approx(rates, abs=0.01)
