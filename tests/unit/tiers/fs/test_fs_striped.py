"""Several roots as one tier."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import shutil
from collections import Counter

import anyio
import pytest

from kvtier import validation
from kvtier.errors import KVTierError, TierError
from kvtier.keys import pack_key
from kvtier.tiers.base import Knowledge, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier, striped, upkeep
from kvtier.tiers.fs.namespace import Namespace
from kvtier.tiers.fs.striped import StripedFs
from kvtier_testing.tiers import TierConformance

pytestmark = pytest.mark.timeout(120)
OK, ABSENT, REFUSED = Status.OK, Status.ABSENT, Status.REFUSED


class TestStriped(TierConformance):
    tier = FsTier
    is_persistent = True
    is_shared = True

    def settings(self, place):
        roots = [str(place / name) for name in ("one", "two", "three")]
        return {"type": "fs", "root_dir": roots, "n_threads": 2, "min_free_bytes": 0, "max_bytes": 2**50}

    def bounded(self, place, capacity_bytes):
        return {**self.settings(place), "max_bytes": capacity_bytes // 3}


def roots_of(world, *names):
    return [world.root / name for name in names]


async def open_striped(world, *names, **settings):
    config = {
        "root_dir": roots_of(world, *names),
        "n_threads": 2,
        "min_free_bytes": 0,
        "max_bytes": 2**50,
        **settings,
    }
    tier = FsTier(FsConfig.model_validate(config))
    await tier.open(TierContext("files", world.identity, world.chunk_bytes))
    return tier


def chunks_in(root):
    return {path.name for path in root.rglob("*.bin")}


async def test_chunks_are_spread_evenly_and_none_is_there_twice(world):
    tier = await open_striped(world, "a", "b", "c", format="files")
    assert isinstance(tier, StripedFs)
    assert (await world.put(tier, range(300))).statuses == (OK,) * 300
    found = [chunks_in(root) for root in roots_of(world, "a", "b", "c")]
    assert sum(map(len, found)) == 300 == len(set.union(*found))
    assert min(map(len, found)) > 60
    assert (await world.get(tier, range(310))).statuses == (OK,) * 300 + (ABSENT,) * 10
    assert list(await tier.contains(world.keys(range(299, 301)))) == [True, False]
    await tier.discard(world.keys(range(150)))
    assert sum(len(chunks_in(root)) for root in roots_of(world, "a", "b", "c")) == 150
    usage = tier.usage()
    assert usage is not None
    assert usage.used_bytes is not None
    await tier.aclose()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["/mnt/nvme{}/kv", "/data{}", "/disks/{}/kvtier/cache"])
def test_no_root_has_much_more_or_less_than_its_share(name, count):
    keys = [pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest()) for number in range(4000)]
    roots = [name.format(number) for number in range(count)]
    tier = StripedFs(FsConfig.model_validate({"root_dir": roots}), FsTier)
    found = tier._shares(keys)
    assert set(found) == set(range(count))
    assert all(0.8 < len(mine) * count / 4000 < 1.2 for mine in found.values())


async def test_a_root_that_is_added_takes_chunks_from_all_and_moves_none_between_the_others(world):
    tier = await open_striped(world, "a", "b", format="files")
    await world.put(tier, range(200))
    before = [chunks_in(root) for root in roots_of(world, "a", "b")]
    await tier.aclose()
    wider = await open_striped(world, "b", "a", "c", format="files")
    statuses = (await world.get(wider, range(200))).statuses
    assert 80 < Counter(statuses)[OK] < 180  # about two thirds stay where they were
    await world.put(wider, range(200))
    assert [chunks_in(root) for root in roots_of(world, "a", "b")] == before
    await wider.aclose()


async def test_a_root_that_cannot_be_opened_costs_its_share_alone(world, caplog):
    tier = await open_striped(world, "a", "b")
    await world.put(tier, range(100))
    await tier.aclose()
    shutil.rmtree(world.root / "b")
    (world.root / "b").write_text("no directory")
    tier = await open_striped(world, "a", "b")
    assert "goes on without the root" in caplog.text
    statuses = (await world.get(tier, range(100))).statuses
    assert set(statuses) == {OK, ABSENT}
    outcome = await world.put(tier, range(100, 200))
    assert set(outcome.statuses) == {OK, REFUSED}
    assert outcome.reasons["root_down"] == outcome.statuses.count(REFUSED) > 20
    assert "root_down" in FsTier.reasons
    lost = [n for n, status in enumerate(statuses) if status is ABSENT]
    assert set(tier.known(world.keys(lost))) == {Knowledge.ABSENT}
    await tier.reset()
    await tier.aclose()


async def test_a_root_that_could_not_be_opened_is_used_when_it_is_back(world, monkeypatch):
    monkeypatch.setattr(striped, "LOOK_AGAIN_S", 0.02)
    tier = await open_striped(world, "a", "b")
    await world.put(tier, range(100))
    await tier.aclose()
    (world.root / "b").rename(world.root / "b.away")
    (world.root / "b").write_text("not mounted")
    told: list[str] = []
    config = FsConfig(root_dir=roots_of(world, "a", "b"), n_threads=2, min_free_bytes=0, max_bytes=2**50)
    tier = FsTier(config)
    await tier.open(TierContext("files", world.identity, world.chunk_bytes, lost=told.append))
    assert set((await world.get(tier, range(100))).statuses) == {OK, ABSENT}
    await anyio.sleep(0.1)
    assert told == []
    (world.root / "link").symlink_to(world.root / "b.away")
    (world.root / "link").replace(world.root / "b")  # at once: where nothing is a look makes a directory
    await world.eventually(lambda: told)
    await anyio.sleep(0.1)
    assert told == [f"its root {world.root / 'b'} can be opened now"]
    await tier.aclose()
    tier = FsTier(config)  # as who was told does
    await tier.open(TierContext("files", world.identity, world.chunk_bytes))
    assert (await world.get(tier, range(100))).statuses == (OK,) * 100
    await tier.aclose()


async def reset_without(world, *names, away):
    """Reset the stripe while a root cannot be opened."""
    hidden = world.root / f"{away}.away"
    (world.root / away).rename(hidden)
    (world.root / away).write_text("not mounted")
    tier = await open_striped(world, *names)
    await tier.reset()
    await tier.aclose()
    (world.root / away).unlink()
    hidden.rename(world.root / away)


async def test_a_root_that_was_away_during_a_reset_has_nothing_when_it_is_back(world, caplog):
    tier = await open_striped(world, "a", "b", "c")
    await world.put(tier, range(100))
    await tier.aclose()
    await reset_without(world, "a", "b", "c", away="b")
    tier = await open_striped(world, "a", "b", "c")
    assert set((await world.get(tier, range(100))).statuses) == {ABSENT}
    assert caplog.text.count("missed a reset") == 1
    assert (await world.put(tier, range(100))).statuses == (OK,) * 100
    other = await open_striped(world, "c", "b", "a")  # what was put now is for all who open it
    assert (await world.get(other, range(100))).statuses == (OK,) * 100
    assert caplog.text.count("missed a reset") == 1
    await other.aclose()
    await tier.aclose()


async def test_a_root_that_missed_a_reset_and_cannot_be_written_is_not_used(world, monkeypatch, caplog):
    tier = await open_striped(world, "a", "b")
    await world.put(tier, range(100))
    await tier.aclose()
    await reset_without(world, "a", "b", away="b")

    def refuse(*args):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Namespace, "_write_small", refuse)
    tier = await open_striped(world, "a", "b")
    assert "goes on without the root" in caplog.text
    assert set((await world.get(tier, range(100))).statuses) == {ABSENT}
    outcome = await world.put(tier, range(100))
    assert 20 < outcome.reasons["root_down"] < 80
    assert outcome.statuses.count(OK) == 100 - outcome.reasons["root_down"]
    await tier.aclose()


async def test_roots_that_were_reset_together_go_on_together(world, caplog):
    tier = await open_striped(world, "a", "b")
    for _ in range(2):
        await tier.reset()
    await tier.aclose()
    tier = await open_striped(world, "a", "b")
    await world.put(tier, range(20))
    await tier.aclose()
    tier = await open_striped(world, "a", "b")
    assert (await world.get(tier, range(20))).statuses == (OK,) * 20
    assert "missed" not in caplog.text
    await tier.aclose()


async def test_a_root_that_is_lost_while_it_is_used_costs_its_share_alone(world, monkeypatch):
    monkeypatch.setattr(upkeep, "TICK_S", 1000.0)  # nobody puts a ledger into what is being removed
    tier = await open_striped(world, "a", "b", format="files")
    await world.put(tier, range(100))
    await world.eventually(lambda: tier._roots[1]._upkeep._watched.listed >= 0)  # nor does what opening began
    shutil.rmtree(world.root / "b")
    statuses = (await world.get(tier, range(100))).statuses
    assert set(statuses) == {OK, ABSENT}
    assert 20 < statuses.count(OK) < 80
    await tier.aclose()


async def test_without_any_root_there_is_no_tier(world):
    world.root.mkdir()
    for name in ("a", "b"):
        (world.root / name).write_text("no directory")
    with pytest.raises(TierError, match="none of its roots can be opened"):
        await open_striped(world, "a", "b")


async def test_a_cancelled_put_ends_in_all_roots(world):
    tier = await open_striped(world, "a", "b")
    task = asyncio.create_task(world.put(tier, range(200)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await tier.aclose()


def test_one_root_in_a_list_is_that_root(tmp_path):
    config = FsConfig.model_validate({"root_dir": [tmp_path]})
    assert config.root_dirs == (tmp_path,)
    assert type(FsTier(config)) is FsTier


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"root_dir": []}, "empty list"),
        ({"root_dir": ["/a", "/b", "/a"]}, "one inside the other"),
        ({"root_dir": ["/a", "/b"], "more_root_dirs": ["/c"]}, "leave the latter away"),
    ],
)
def test_roots_that_make_no_sense_are_refused_in_words(given, words):
    with pytest.raises(KVTierError, match=words):
        validation.build(FsConfig, given)
