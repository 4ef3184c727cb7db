"""Several roots as one tier."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter

import pytest

from kvtier import validation
from kvtier.errors import KVTierError, TierError
from kvtier.testing.tiers import TierConformance
from kvtier.tiers.base import Knowledge, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.striped import StripedFs

pytestmark = pytest.mark.timeout(120)
OK, ABSENT, REFUSED = Status.OK, Status.ABSENT, Status.REFUSED


class TestStriped(TierConformance):
    tier = FsTier
    is_persistent = True
    is_shared = True

    def settings(self, place):
        roots = [str(place / name) for name in ("one", "two", "three")]
        return {"type": "fs", "root_dir": roots, "n_threads": 2, "min_free_bytes": 0}

    def bounded(self, place, capacity_bytes):
        return {**self.settings(place), "max_bytes": capacity_bytes // 3}


def roots_of(world, *names):
    return [world.root / name for name in names]


async def open_striped(world, *names, **settings):
    config = {"root_dir": roots_of(world, *names), "n_threads": 2, "min_free_bytes": 0, **settings}
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


async def test_a_root_that_is_lost_while_it_is_used_costs_its_share_alone(world):
    tier = await open_striped(world, "a", "b", format="files")
    await world.put(tier, range(100))
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
        ({"root_dir": ["/a", "/b", "/a"]}, "names a directory twice"),
        ({"root_dir": ["/a", "/b"], "more_root_dirs": ["/c"]}, "leave the latter away"),
    ],
)
def test_roots_that_make_no_sense_are_refused_in_words(given, words):
    with pytest.raises(KVTierError, match=words):
        validation.build(FsConfig, given)
