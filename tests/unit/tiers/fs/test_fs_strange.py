"""Non-files in place of files: a process that can write below a root can only cause misses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import TierError
from kvtier.tiers import Status
from kvtier.tiers.fs import FsTier

pytestmark = pytest.mark.timeout(60)  # opening a FIFO as a file blocks forever
OK = Status.OK


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.fixture(params=[os.mkfifo, os.mkdir, link_to_nothing, link_to_itself], ids=lambda make: make.__name__)
def replace(request) -> Callable[[Path], None]:
    """A function that replaces a file by a non-file."""

    def put(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        request.param(path)

    return put


async def test_as_chunk_misses(world, replace):
    tier = await world.open()
    await world.put(tier, range(8))
    replace(world.file(3))
    outcome = await world.get(tier, range(8))
    assert outcome.statuses[3] is not OK
    assert [status for number, status in enumerate(outcome.statuses) if number != 3] == [OK] * 7
    await tier.discard(world.keys([3]))
    assert (await world.put(tier, range(8, 16))).statuses == (OK,) * 8


async def test_as_manifest_is_refused(world, replace):
    await (await world.open()).aclose()
    replace(world.namespace / "config.json")
    with pytest.raises(TierError, match=r"config\.json|cannot be"):
        await world.open()


async def test_as_epoch_hides_or_refuses(world, replace):
    tier = await world.open()
    await world.put(tier, [1])
    await tier.aclose()
    epoch = world.namespace / "epoch"
    replace(epoch)
    if epoch.is_dir():  # no write removes it
        with pytest.raises(TierError, match="eisdir"):
            await world.open()
        return
    again = await world.open()
    assert again.statistics().epoch > 0, "what it was cannot be known"
    assert (await world.get(again, [1])).statuses == (Status.ABSENT,)


async def test_link_as_writer_removes_nothing(world, tmp_path):
    tier = await world.open()
    (writer,) = (path for path in (world.namespace / ".tmp").iterdir() if path.is_dir())
    (tmp_path / "mine").touch()
    writer.rmdir()
    writer.symlink_to(tmp_path)
    await tier.aclose()
    assert (tmp_path / "mine").exists()


async def test_as_unfinished_epoch_fails_reset(world, replace):
    tier = await world.open()
    await world.put(tier, [1])
    (writer,) = (path for path in (world.namespace / ".tmp").iterdir() if path.is_dir())
    replace(writer / "epoch")
    with pytest.raises(TierError, match="could not be stored"):
        await tier.reset()
    assert not (writer / "nowhere").exists(), "a link could name any file of this user"
    assert (await world.get(tier, [1])).statuses == (Status.ABSENT,)


async def test_as_ledger_names_remedy(world, replace):
    await (await world.open()).aclose()
    ledger = world.root / ".kvtier" / "ledger"
    replace(ledger)
    with pytest.raises(TierError, match=r"\.kvtier/ledger is not a ledger: remove it"):
        await world.open()
    if ledger.is_dir() and not ledger.is_symlink():
        ledger.rmdir()
    else:
        ledger.unlink()
    assert isinstance(await world.open(), FsTier)
