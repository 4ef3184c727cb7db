"""The contract of a tier, third part: opening, closing, other caches and damage."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import anyio
import pytest

from kvtier import Identity
from kvtier._core.messages import Answer
from kvtier.tiers import Status
from kvtier_testing.tiers.rig import aside, check_whole, expect, fail, key, keys, names_of
from kvtier_testing.tiers.setup import Damage, TierSetup

_RESTART_GRACE = 300  # times settle_s


class LifecycleTests(TierSetup):
    """Tiers that are opened, closed, reset, shared and damaged."""

    async def test_caches_of_other_identities_are_apart(self, place: Path) -> None:
        other = Identity.make("kvtier/conformance", {"place": place.name, "dtype": "another"})
        async with self.opened(place) as it:
            await it.put(range(4))
        async with self.opened(place, identity=other) as it:
            statuses = (await it.tier.get(it.empty(range(4))[0])).statuses
            expect(set(statuses) == {Status.ABSENT}, f"chunks of another identity: {names_of(statuses)}")
            expect(not any(await it.contains(range(4))), "contains() says yes to chunks of another identity")
            await it.put(range(2), version=1)
            await it.tier.discard(keys([2]))
            await it.tier.reset()
        if self.is_persistent:
            async with self.opened(place) as it:
                it.expect_kept(await it.get(range(4)), "chunks of one identity after another was reset")

    async def test_several_tiers_share_a_place(self, place: Path) -> None:
        if not self.is_shared:
            pytest.skip(f"{type(self).__name__}.is_shared is False: one tier has a place to itself")
        async with self.opened(place) as one, self.opened(place) as two:
            await one.put(range(4))
            two.expect_kept(await two.get(range(4)), "what another tier has put")
            async with anyio.create_task_group() as tasks:
                for rig in (one, two):
                    tasks.start_soon(rig.put, range(4, 40))
                    tasks.start_soon(rig.get, range(40))
            one.expect_kept(await one.get(range(40)), "what two tiers have put at once")
        async with self.opened(place) as it:
            it.expect_kept(await it.get(range(40)), "what two tiers have put")

    async def test_a_chunk_that_another_tier_discards_is_absent(self, place: Path) -> None:
        if not self.is_shared:
            pytest.skip(f"{type(self).__name__}.is_shared is False: one tier has a place to itself")
        async with self.opened(place) as one, self.opened(place) as two:
            one.expect_kept(await one.put(range(4)), "a put")
            two.expect_kept(await two.get(range(4)), "what another tier has put")
            await two.contains(range(4))
            await one.tier.discard(keys([1]))
            statuses = await two.get(range(4))
            expect(
                statuses[1] is Status.ABSENT,
                f"a get of a chunk that another tier has discarded: {names_of(statuses)}; answer ABSENT",
            )
            two.expect_kept([statuses[0], *statuses[2:]], "chunks beside one that another tier has discarded")
            expect(not (await two.contains([1]))[0], "contains() says yes to what a get found to be ABSENT")
            two.expect_kept(await two.put([1]), "a put of what another tier has discarded")
            one.expect_kept(await one.get([1]), "a chunk that was discarded and put again")

    async def test_a_reset_parts_tiers_that_share_a_place(self, place: Path) -> None:
        if not self.is_shared:
            pytest.skip(f"{type(self).__name__}.is_shared is False: one tier has a place to itself")
        numbers = range(4)
        async with self.opened(place) as one, self.opened(place) as two:
            two.expect_kept(await two.put(numbers), "a put")
            await one.tier.reset()
            await two.put(numbers)
            statuses, found = await one.get(numbers), await one.contains(numbers)
            expect(
                set(statuses) == {Status.ABSENT} and not any(found),
                "a tier that was reset gives what another has put since, perhaps with older weights (get(): "
                f"{names_of(statuses)}; contains(): {found}). After a reset it gives its own chunks alone",
            )
            one.expect_kept(await one.put(numbers, version=1), "a put after a reset")
            await two.get(numbers)  # checks that it gives none of these
            one.expect_kept(await one.get(numbers, versions=(1,)), "what was put after a reset")

    async def test_chunks_of_another_length_are_not_given(self, place: Path) -> None:
        if not self.is_persistent:
            pytest.skip(f"{type(self).__name__}.is_persistent is False: there are none")
        for put_bytes in (2 * self.chunk_bytes, self.chunk_bytes // 2):
            here = place.with_name(f"{place.name}-{put_bytes}")
            async with self.opened(here, chunk_bytes=put_bytes) as it:
                await it.put(range(4))
            async with self.driven(here) as driver:
                fetched = await driver.fetch(range(4))
                what = f"chunks of {put_bytes} bytes in a tier of {self.chunk_bytes} bytes"
                names = [Answer(answer).name for answer in fetched.answers]
                expect(
                    "COPIED" not in names, f"a fetch of {what}: {names}; a chunk of another length is none"
                )
                put = await driver.put(range(4))
                fetched = await driver.fetch(range(4))
                driver.check_copied(range(4), fetched)
                for kept, answer in zip(put.kept, fetched.answers, strict=True):
                    expect(
                        not kept or answer == Answer.COPIED or self.is_lossy,
                        f"a put over {what} was OK, and a fetch after it ended {Answer(answer).name}; put "
                        "replaces a chunk of another length",
                    )
            self.wipe(here)

    async def test_a_backend_that_was_restarted_is_used_again(self, place: Path) -> None:
        self.require("restart", "the backend cannot be restarted")
        async with self.driven(place) as driver:
            await driver.put(range(4))
            await aside(self.restart, place)
            driver.check_copied(range(4), await driver.fetch(range(4)))
            answers: list[str] = []
            for _ in range(_RESTART_GRACE):
                await driver.put(range(4, 8))
                fetched = await driver.fetch(range(4, 8))
                driver.check_copied(range(4, 8), fetched)
                answers = [Answer(answer).name for answer in fetched.answers]
                if set(answers) == {"COPIED"}:
                    return
                await anyio.sleep(self.settle_s)
        fail(
            f"chunks put after a restart of the backend are not found: {answers}; connect again, or call "
            "TierContext.lost"
        )

    @pytest.mark.parametrize("damage", list(Damage), ids=lambda damage: damage.name.lower())
    async def test_a_damaged_chunk_is_not_given_and_can_be_put_again(
        self, place: Path, damage: Damage
    ) -> None:
        expect(
            self.defines("damage") or not self.tier.verifies,
            f"{self.tier.__name__} verifies its chunks itself, and {type(self).__name__} does not define "
            "damage(): kvtier checks nothing that it gives, so show that it finds damage",
        )
        self.require("damage", "what is stored cannot be damaged")
        async with self.driven(place) as driver:
            tier = driver.rig.tier
            await driver.put(range(4))
            await aside(self.damage, tier, place, key(2), damage)
            fetched = await driver.fetch(range(4))
            expected = [Answer.COPIED, Answer.COPIED, Answer.MISSING, Answer.COPIED]
            answers = [Answer(answer) for answer in fetched.answers]
            # The chunks got end before one that the tier already knows to be damaged.
            expect(
                answers[:3] == expected[:3] and answers[3] in (Answer.COPIED, Answer.LOCATED),
                f"with a damaged third chunk ({damage.value}) a fetch answered {[a.name for a in answers]}",
            )
            driver.check_copied(range(4), fetched)
            put = await driver.put(range(4))
            expect(all(put.kept), f"after it was damaged ({damage.value}): {dict(put.reasons)}")
            fetched = await driver.fetch(range(4))
            driver.check_copied(range(4), fetched)
            names = [Answer(answer).name for answer in fetched.answers]
            expect(set(names) == {"COPIED"}, f"a chunk that was damaged and put again: {names}")

    @pytest.mark.parametrize("after_s", [0.0, 0.001, 0.005, 0.02])
    async def test_closing_under_load_leaves_whole_chunks_or_none(self, place: Path, after_s: float) -> None:
        started = []
        async with self.driven(place, slots=64) as driver:
            await driver.put(range(8))
            for first in range(0, 32, 4):
                for slot in range(first, first + 4):
                    driver.memory.view(slot)[:] = driver.rig.content(100 + slot)
                started.append(driver.start_put(range(100 + first, 104 + first), range(first, first + 4)))
                started.append(driver.start_fetch(range(4), range(32 + first, 36 + first)))
            await anyio.sleep(after_s)
        ended = driver.ends_of(started)
        expect(set(ended) == {1}, f"transfers under way when the tier was closed ended {ended} times")
        await anyio.sleep(self.settle_s)
        driver.check_reused(range(64), "a transfer that was under way when the tier was closed")
        if self.is_persistent:
            async with self.opened(place) as it:
                it.expect_kept(await it.get(range(8)), "chunks that were put before")
                await check_whole(it, range(100, 132), versions=(0,))

    async def test_nobody_else_may_read_what_it_keeps_in_files(self, place: Path) -> None:
        """Check the files at the place and next to it whose names begin with the place's name."""
        usual = os.umask(0)  # so that only the modes that the tier requests protect them
        try:
            async with self.opened(place) as it:
                await it.put(range(4))
                readable = await aside(_readable_by_others, place)
        finally:
            os.umask(usual)
        expect(
            not readable, f"others may read or write what it keeps; make it 0600, folders 0700: {readable}"
        )


def _readable_by_others(place: Path) -> list[str]:
    found = [path for beside in place.parent.glob(f"{place.name}*") for path in (beside, *beside.rglob("*"))]
    modes = {path: path.lstat().st_mode for path in found if not path.is_symlink()}
    return sorted(f"{path.name} {stat.S_IMODE(mode):o}" for path, mode in modes.items() if mode & 0o077)
