"""Which format a tier takes: what is said, else what is there, else what suits the chunks' length."""

from __future__ import annotations

import logging

import pytest

from kvtier import native
from kvtier.errors import TierError
from kvtier.tiers.base import Status
from kvtier.tiers.fs import FsConfig, formats
from kvtier.tiers.fs.formats import SMALL_BYTES, choose

OK, ABSENT = Status.OK, Status.ABSENT
NONE: frozenset[str] = frozenset()
FILES, SEGMENTS = frozenset({"files"}), frozenset({"segments"})
BOTH = FILES | SEGMENTS


@pytest.mark.parametrize(
    ("said", "there", "short", "long"),
    [
        ("auto", NONE, "segments", "files"),
        ("auto", BOTH, "segments", "files"),
        ("auto", FILES, "files", "files"),
        ("auto", SEGMENTS, "segments", "segments"),
        *((said, there, said, said) for said in ("files", "segments") for there in (NONE, FILES, SEGMENTS)),
    ],
)
def test_what_is_said_comes_first_then_what_is_there_then_the_length(said, there, short, long):
    config = FsConfig.model_validate({"root_dir": "/r", "format": said})
    assert choose(config, SMALL_BYTES - 4096, there) == short
    assert choose(config, SMALL_BYTES, there) == long


@pytest.mark.parametrize(
    ("there", "chunks", "expected"),
    [(NONE, 130, "files"), (NONE, 150, "segments"), (SEGMENTS, 130, "segments")],
)
def test_a_small_root_is_one_of_files_for_a_segment_leaves_as_a_whole(there, chunks, expected):
    config = FsConfig.model_validate({"root_dir": "/r", "max_bytes": chunks * 65536})
    assert choose(config, 65536, there) == expected


@pytest.mark.parametrize("there", [NONE, SEGMENTS])
def test_the_layout_of_vllm_is_always_files(there):
    config = FsConfig.model_validate({"root_dir": "/r", "layout": "vllm", "integrity": "none"})
    assert choose(config, 4096, there) == "files"


@pytest.fixture(params=["native", "python"])
def work(request, monkeypatch):
    """Nothing: tiers choose what does the work, where the helper is there and where it is not."""
    if request.param == "python":
        monkeypatch.setattr(native, "library", None)


def found(world):
    """How many chunks lie in files, and whether there are segments."""
    return len(list(world.root.rglob("*.bin"))), any(world.root.rglob("*.seg"))


@pytest.mark.parametrize(("chunk_bytes", "expected"), [(16384, (0, True)), (SMALL_BYTES, (10, False))])
async def test_on_an_empty_root_the_length_decides(world, chunk_bytes, expected):
    world.chunk_bytes = chunk_bytes
    tier = await world.open()
    assert set((await world.put(tier, range(10))).statuses) == {OK}
    assert found(world) == expected
    assert set((await world.get(tier, range(10))).statuses) == {OK}


@pytest.mark.parametrize("first", ["files", "segments"])
async def test_what_an_earlier_engine_has_put_is_given_and_added_to_in_its_format(world, caplog, first):
    tier = await world.open(format=first)
    await world.put(tier, range(10))
    await tier.aclose()
    for chunks in (10, 20):
        tier = await world.open()
        assert (await world.get(tier, range(20))).statuses == (OK,) * chunks + (ABSENT,) * (20 - chunks)
        await world.put(tier, range(20))
        await tier.aclose()
    assert found(world) == ((20, False) if first == "files" else (0, True))
    assert "another format" not in caplog.text


async def test_chunks_of_a_format_that_was_said_away_are_told(world, caplog):
    tier = await world.open(format="files")
    await world.put(tier, range(10))
    await tier.aclose()
    with caplog.at_level(logging.WARNING, "kvtier.tiers.fs"):
        tier = await world.open(format="segments")
    assert (await world.get(tier, range(10))).statuses == (ABSENT,) * 10
    assert f"{world.identity.namespace}_r0 holds chunks in another format, too (files)" in caplog.text
    await world.put(tier, range(10))
    assert found(world) == (10, True)
    tier = await world.open()  # both are there: the length decides again
    assert set((await world.get(tier, range(10))).statuses) == {OK}


async def test_after_a_reset_the_format_stays_until_the_tier_is_opened_again(world):
    old = await world.open(format="files")
    await world.put(old, range(10))
    await old.aclose()
    tier = await world.open()
    await tier.reset()
    await world.put(tier, range(10))
    assert len(list(world.root.glob("*_r0.e1/*/*/*.bin"))) == 10
    await tier.aclose()
    tier = await world.open()  # of an epoch that nobody has written to
    await world.put(tier, range(10))
    assert len(list(world.root.glob("*_r0.e2/segments/*.seg"))) == 1


async def test_several_roots_each_go_on_with_what_they_hold(world):
    one, two = world.root / "one", world.root / "two"
    tier = await world.open(root_dir=one, format="files")
    await world.put(tier, range(40))
    await tier.aclose()
    tier = await world.open(root_dir=[one, two])
    await world.put(tier, range(40))
    assert len(list(one.rglob("*.bin"))) == 40
    assert any(two.rglob("*.seg"))
    assert set((await world.get(tier, range(40))).statuses) == {OK}


async def test_an_epoch_that_cannot_be_looked_at_is_refused_in_words(world, monkeypatch):
    def fails(place):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(formats, "formats_in", fails)
    with pytest.raises(TierError, match=r"tier files: .* cannot be measured \(eio\)"):
        await world.open()
