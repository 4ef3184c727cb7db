"""The layout of vLLM's own fs tier: its names, bare bytes, and what is refused without a checksum."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest

from kvtier.errors import ConfigError, TierError
from kvtier.identity import Identity, Value
from kvtier.tiers import registry
from kvtier.tiers.base import Status

NAME = "org_Model-7B_0123456789ab"
FIELDS: dict[str, Value] = {"model_name": "org/Model-7B", "inference_engine": "vllm", "tp_size": 1}
SHARED = {"layout": "vllm", "integrity": "none"}


@pytest.fixture
def shared(world):
    """A world whose engine knows what vLLM's own tier calls the cache."""
    world.identity = replace(world.identity, native=Identity("org/Model-7B", FIELDS, NAME))
    return world


def native_file(world, number: int):
    """Where vLLM's own fs tier keeps a chunk."""
    return world.file(number, data_dir=f"{NAME}_r0")


def write_as_vllm(world, number: int, content: bytes) -> None:
    file = native_file(world, number)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


async def test_a_file_is_the_chunks_bytes_under_vllms_name(shared) -> None:
    tier = await shared.open(**SHARED)
    await shared.put(tier, range(6))
    for number in range(6):
        assert native_file(shared, number).read_bytes() == shared.content(number)
    assert json.loads((shared.root / NAME / "config.json").read_text()) == FIELDS
    assert not list(shared.root.glob(f"{shared.identity.namespace}*"))


async def test_what_vllm_has_written_is_given(shared) -> None:
    shared.root.mkdir()
    (shared.root / NAME).mkdir()
    (shared.root / NAME / "config.json").write_text(json.dumps(FIELDS, indent=2, sort_keys=True))
    for number in range(5):
        write_as_vllm(shared, number, shared.content(number))
    tier = await shared.open(**SHARED)
    assert await tier.contains(shared.keys(range(6))) == [True] * 5 + [False]
    outcome = await shared.get(tier, range(6))
    assert list(outcome.statuses) == [Status.OK] * 5 + [Status.ABSENT]


async def test_what_vllm_has_written_is_not_written_again(shared) -> None:
    write_as_vllm(shared, 1, shared.content(1))
    inode = native_file(shared, 1).stat().st_ino
    tier = await shared.open(**SHARED)
    outcome = await shared.put(tier, [1])
    assert list(outcome.statuses) == [Status.OK]
    assert native_file(shared, 1).stat().st_ino == inode


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
async def test_a_file_of_another_length_is_not_given(shared, change: int) -> None:
    content = shared.content(1)
    write_as_vllm(shared, 1, content[:change] if change < 0 else content + bytes(change))
    tier = await shared.open(**SHARED)
    outcome = await shared.get(tier, [1])
    assert list(outcome.statuses) == [Status.CORRUPT]
    assert outcome.reasons == {"torn": 1}
    assert not native_file(shared, 1).exists()
    await shared.put(tier, [1])
    assert native_file(shared, 1).read_bytes() == content


async def test_what_vllm_has_written_is_given_where_nothing_can_be_written(
    shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as_vllm(shared, 1, shared.content(1))
    (shared.root / NAME).mkdir()
    (shared.root / NAME / "config.json").write_text(json.dumps(FIELDS))

    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    tier = await shared.open(**SHARED)
    assert list((await shared.get(tier, [1, 2])).statuses) == [Status.OK, Status.ABSENT]
    assert [path.name for path in (shared.root / NAME).iterdir()] == ["config.json"]


async def test_a_manifest_of_another_configuration_is_refused(shared) -> None:
    (shared.root / NAME).mkdir(parents=True)
    (shared.root / NAME / "config.json").write_text(json.dumps({**FIELDS, "tp_size": 2}))
    with pytest.raises(TierError, match="tp_size is 2 there and 1 here"):
        await shared.open(**SHARED)


async def test_without_a_name_of_vllms_it_is_refused(world) -> None:
    with pytest.raises(TierError, match="no engine of vLLM's"):
        await world.open(**SHARED)
    assert not list(world.root.glob("*"))


async def test_a_reset_hides_the_shared_chunks_and_leaves_the_files(shared) -> None:
    write_as_vllm(shared, 1, shared.content(1))
    tier = await shared.open(**SHARED)
    await tier.reset()
    assert list((await shared.get(tier, [1])).statuses) == [Status.ABSENT]
    await tier.aclose()
    again = await shared.open(**SHARED, recount_s=0.05)
    assert list((await shared.get(again, [1])).statuses) == [Status.ABSENT]
    await again.aclose()  # it has swept by now, or never
    assert native_file(shared, 1).read_bytes() == shared.content(1)


async def test_what_is_removed_by_hand_ends_a_reset(shared) -> None:
    write_as_vllm(shared, 1, shared.content(1))
    tier = await shared.open(**SHARED)
    await tier.reset()
    await shared.put(tier, [2])
    await tier.aclose()
    for pattern in ("epoch", "users.e*.lock"):
        for path in (shared.root / NAME).glob(pattern):
            path.unlink()
    for folder in shared.root.glob(f"{NAME}_r0.e*"):
        shutil.rmtree(folder)
    again = await shared.open(**SHARED)
    assert list((await shared.get(again, [1, 2])).statuses) == [Status.OK, Status.ABSENT]


async def test_a_lost_epoch_does_not_bring_back_what_a_reset_has_hidden(shared) -> None:
    write_as_vllm(shared, 1, shared.content(1))
    tier = await shared.open(**SHARED)
    await tier.reset()
    await tier.aclose()
    (shared.root / NAME / "epoch").unlink()
    again = await shared.open(**SHARED)
    assert list((await shared.get(again, [1])).statuses) == [Status.ABSENT]


async def test_the_bound_holds_for_bare_files_too(shared) -> None:
    tier = await shared.open(**SHARED, max_bytes=300_000, eviction="none")
    outcome = await shared.put(tier, range(40))
    assert Status.REFUSED in outcome.statuses
    taken = sum(path.stat().st_blocks * 512 for path in shared.root.rglob("*"))
    assert taken <= 300_000


async def test_the_start_says_what_is_lost(shared, caplog: pytest.LogCaptureFixture) -> None:
    await shared.open()
    assert "WRONG TOKENS" not in caplog.text
    await shared.open(**SHARED)
    assert "CAN GIVE WRONG TOKENS" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layout": "vllm"}, ["layout", "integrity 'none'"]),
        ({"integrity": "none"}, ["integrity", "layout 'vllm'"]),
        ({"layout": "vllm", "integrity": "none", "format": "segments"}, ["format", "layout 'vllm'"]),
        ({"layout": "lmcache", "integrity": "none"}, ["layout"]),
    ],
)
def test_one_without_the_other_is_refused_in_words(settings, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        registry.validate({"type": "fs", "root_dir": "/data", **settings})
    assert all(word in str(refusal.value) for word in words)
