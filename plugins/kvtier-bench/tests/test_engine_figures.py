"""Figures from the samples of real engines."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from kvtier_bench.engine import demo, fleet, fleet_faults, hints, restart, serving
from kvtier_bench.engine.compared import PLAIN, Sample
from kvtier_bench.engine.versus import faults, speed
from kvtier_bench.engine.versus.run import interpreter
from kvtier_bench.engine.versus.systems import KVTIER, LMCACHE

FLEET_FAULTS = [fleet_faults.CONTROL, fleet_faults.ALTERED, fleet_faults.STOPPED]


def test_second_engine_compared_per_round() -> None:
    def one(ttft_s: float, answer: int, cached: int = fleet.PROMPT_TOKENS) -> Sample:
        return Sample(ttft_s, [ttft_s], [[answer]], {"cached": cached})

    def found(*seconds: Sample) -> list[fleet.Answers]:
        return [fleet.Answers(one(10.0, 1, 0), second, one(0.5, 1)) for second in seconds]

    answers = {fleet.FILES: found(one(1.0, 1), one(2.0, 1)), "redis": found(one(3.0, 1), one(6.0, 2, 0))}
    files, redis, computed, device = fleet.table(answers)
    assert (files.ratio, redis.ratio, computed.ratio, device.ratio) == (1.0, 3.0, 7.5, 0.375)
    assert (redis.ttft_ms, redis.from_cache, redis.wrong) == (4500.0, "1280 of 2560", "1 of 2")


def test_faults_add_up_over_pairs() -> None:
    def seen(fault: str, right: bool) -> fleet_faults.Seen:
        sample = Sample(1.0, [1.0, 3.0], [[1], [2]], {"cached": 64, "tokens": 128})
        return fleet_faults.Seen(fault, [([1], [1]), ([2], [2 if right else 3])], sample)

    rows = fleet_faults.table("x", [seen(name, name != fleet_faults.ALTERED) for name in FLEET_FAULTS * 2])
    assert [(row.fault, row.wrong) for row in rows] == [
        (name, "2 of 4" if name == fleet_faults.ALTERED else "0 of 4") for name in FLEET_FAULTS
    ]
    assert {(row.way, row.from_cache, row.longest_s) for row in rows} == {("x", "128 of 256", 3.0)}


HOLDER = """
import mmap, sys
memory = mmap.mmap(-1, 1 << 20)
print(flush=True)
sys.stdin.readline()
print(sum(byte != 0 for byte in memory[:]))
"""


def test_flips_four_bits_a_chunk() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        fleet_faults.flip_memory(holder.pid, 1 << 20, chunk_bytes=1 << 18)
        changed, _ = holder.communicate("\n")
    assert int(changed) == 16


def test_kept_memory_compares_in_pairs() -> None:
    def one(wall_s: float, cpu_s: float, tier_s: float) -> Sample:
        return Sample(wall_s, counts={"cpu_s": cpu_s, "tier_s": tier_s, "chunks": 100})

    without = [one(1.0, 2.0, 0.0), one(4.0, 8.0, 0.0), one(2.0, 4.0, 0.0)]
    row = restart.compare("none", without, [one(2.0, 3.0, 0.02), one(5.0, 9.0, 0.02), one(2.0, 4.0, 0.02)])
    assert (row.lost_percent, row.low, row.high) == pytest.approx((20.0, 0.0, 50.0))
    assert (row.tier_us, row.core_percent, row.cpu_percent) == pytest.approx((200.0, 1.0, 12.5))


def test_losses_compare_with_neighbours() -> None:
    idle, slower = serving.Stretch(2.0, 1.0, 0.0, 0.0), serving.Stretch(4.0, 1.0, 0.0, 0.0)
    found = {
        serving.CONTROL: [(idle, serving.Stretch(3.0, 1.0, 0.0, 0.0), slower)],
        serving.OF_ENGINE: [(idle, serving.Stretch(4.0, 1.5, 1.0, 2.0), idle)],
    }
    control, reading = serving.table(found)
    assert (control.lost_percent, control.gb_s, control.tier_s_per_gb) == (0.0, 0.0, None)
    assert (reading.lost_percent, reading.low, reading.high) == (50.0, 50.0, 50.0)
    assert (reading.gb_s, reading.engine_cpu, reading.tier_s_per_gb) == (0.5, 1.5, 0.5)


def test_stored_tokens_count_both_sides() -> None:
    work = speed.Work(rounds=2)
    prompts = [*work.single("storage", 0), *work.single("cold", 0), *work.together("unseen", 0)]
    prompts += [*work.single("restarted", 0), *work.together("convoy", 0)]
    answers = work.batch * speed.BATCH_OUTPUT + work.convoy * (speed.TAIL_TOKENS + speed.OUTPUT_TOKENS)
    assert work.stored_tokens == 4 * (sum(map(len, prompts)) + answers)


def test_phases_have_matching_controls() -> None:
    def answered(tokens: list[int], **loaded: int) -> demo.Round:
        return demo.Round([0.1], [tokens], Counter(loaded))

    rounds = {"computed": answered([1]), "device_hit": answered([2]), "cold": answered([1])}
    rounds |= {"cpu_hit": answered([2], cpu=8928), "restart_host_hit": answered([2])}
    rounds |= {"restart_fs_hit": answered([1], fs=8928)}
    assert [phase.identical for phase in demo.compare(rounds)] == [True, True, True, False]
    assert demo.find_problems(demo.compare(rounds)) == [
        "restart_host_hit: tier adopted gave nothing",
        "restart_fs_hit: answers differ from the engine's without a connector",
    ]


def test_measures_compare_within_round() -> None:
    found = {
        speed.HOST: {LMCACHE: [20.0, 400.0, 60.0], KVTIER: [10.0, 100.0, 20.0]},
        speed.UNSEEN: {KVTIER: [1.1, 2.2, 3.3], PLAIN: [1.0, 2.0, 3.0]},
        speed.WRITTEN: {KVTIER: [1.5], LMCACHE: [3.0]},
    }
    rows = {
        (row.measure, row.system): row for row in speed.table(found, {(speed.HOST, LMCACHE): [1279, 1280]})
    }
    host = rows[speed.HOST, LMCACHE]
    assert (host.value, host.ratio, host.low, host.high, host.against) == (60.0, 3.0, 2.0, 4.0, KVTIER)
    assert host.from_cache == "1279 of 1280"
    assert rows[speed.HOST, KVTIER].ratio is None
    assert rows[speed.UNSEEN, KVTIER].ratio == pytest.approx(1.1)
    assert rows[speed.UNSEEN, KVTIER].against == PLAIN
    assert rows[speed.WRITTEN, LMCACHE] == speed.Speed(speed.WRITTEN, LMCACHE, 3.0, 2.0, against=KVTIER, n=1)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "wrong", "failed"),
    [
        ([1, 2, 3], [-0.5, -1.0, -1.5], 0, 0),
        ([1, 2, 3], [-0.5, -1.00001, -1.5], 0, 0),  # Equal engines differ this much.
        ([1, 2, 4], [-0.5, -1.0, -1.5], 1, 0),
        ([1, 2, 3], [-0.5, -1.0, -1.6], 1, 0),  # The likeliest token is the same by chance.
        ([1, 2, 3], [-0.5, float("nan"), -1.5], 1, 0),
        ([1, 2], [-0.5, -1.0], 0, 1),
    ],
)
def test_wrong_answer_detected(tokens: list[int], logprobs: list[float], wrong: int, failed: int) -> None:
    reference = {"answers": [[1, 2, 3], [5]], "logprobs": [[-0.5, -1.0, -1.5], [-2.0]]}
    answer = {"answers": [tokens, [5]], "logprobs": [logprobs, [-2.0]]}
    assert faults.count_wrong(answer, reference) == wrong
    assert faults.count_failed(answer, reference) == failed


def test_flipped_bit_gives_huge_number(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(struct.pack("<101f", *[0.1] * 101))
    faults.flip_a_bit(path)
    numbers = struct.unpack("<101f", path.read_bytes())
    assert len([number for number in numbers if number > 1e30]) == 1
    assert len([number for number in numbers if number == pytest.approx(0.1)]) == 100


def test_each_chunk_of_host_memory_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(struct.pack("<300f", *[0.1] * 300) + bytes(100))
    faults.flip_bits(path, 400)
    memory = path.read_bytes()
    chunks = [struct.unpack("<100f", memory[first : first + 400]) for first in (0, 400, 800)]
    assert [len([number for number in chunk if number > 1e30]) for chunk in chunks] == [4, 4, 4]
    assert memory[1200:] == bytes(100), "the table behind the chunks is whole"


def test_interpreter_is_found_from_other_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert interpreter("./python") == str(tmp_path / "python"), "a link says which environment it is"
    assert interpreter(None) == sys.executable


def test_agents_come_back_after_pauses() -> None:
    work = hints.Agents("generated", 6, 4, 16, 10.0, 0.5, "tiny")
    chosen = list(hints.conversations_of(None, work, 1))
    turns = list(hints.schedule(chosen, work, 1))
    for number, ids in enumerate(chosen):
        own = [turn for turn in turns if turn.session == f"agent {number}"]
        assert [turn.is_first for turn in own] == [True, *[False] * (len(ids) - 1)]
        assert [turn.is_last for turn in own] == [*[False] * (len(ids) - 1), True]
        assert all(one.tokens[:-2] == two.tokens[: len(one.tokens) - 2] for one, two in pairwise(own))
    begun = [turn.is_first - turn.is_last for turn in turns]
    assert max(accumulate(begun)) <= 4, "four at a time"


def test_returning_turns_compare_with_themselves() -> None:
    def one(ttft_s: float, fetched: int) -> Sample:
        return Sample(ttft_s, [ttft_s], [[1]], {"cached": 64, "fetched": fetched})

    turns = [hints.Turn("a", True, at == 0, at == 3, [2] * 128) for at in range(4)]
    plain = [one(ttft_s, 1) for ttft_s in (9.0, 1.0, 2.0, 4.0)]
    samples = {"no hints": plain, "pin": [one(sample.wall_s / 2, 0) for sample in plain]}
    none, pin = hints.table(turns, samples)
    assert (none.turns, none.ttft_p50, none.ratio, none.memory_percent, none.files_percent) == (
        3,
        2e3,
        1,
        25,
        25,
    )
    assert (pin.ttft_p50, pin.ratio, pin.memory_percent, pin.files_percent) == (1e3, 0.5, 50, 0)
