"""The contract of a tier, first part: one call at a time."""

from __future__ import annotations

from pathlib import Path

import anyio

from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import Batch, Knowledge, Status, TierConfig
from kvtier.tiers import _registry as registry
from kvtier_testing.tiers.rig import PATTERNED, CountedMemory, TierRig, expect, fail, key, keys, names_of
from kvtier_testing.tiers.setup import TierSetup

_GRACE = 50  # times settle_s
_USED_CHUNKS = 16
_AGAIN = 8
_SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "token", "credential", "credentials"}
_WHERE_WORDS = {"file", "path", "command", "env", "url"}  # settings that locate a secret
_HASHES = (b"\xab", b"\xab\0", b"\0", b"\0\0", b"/", b"..", b"%2F", b"\xff" * 64, b"\xff" * 63, b"A", b"a")


class BasicTests(TierSetup):
    """Puts, gets and lookups, one at a time."""

    def test_its_entry_point_is_found_under_its_type(self, place: Path) -> None:
        name = self.settings(place)["type"]
        expect(isinstance(name, str), f"settings() has the type {name!r}")
        loaded = registry.load(str(name))
        expect(
            issubclass(self.tier, loaded),
            f"the entry point {name!r} in the group kvtier.tiers names {loaded.__qualname__}, "
            f"not {self.tier.__qualname__}",
        )

    def test_settings_are_described_and_secrets_are_hidden(self) -> None:
        own = {
            name: field
            for name, field in self.tier.Config.model_fields.items()
            if field is not TierConfig.model_fields.get(name) and name != "type"
        }
        bare = sorted(name for name, field in own.items() if not field.description)
        expect(
            not bare,
            f"the settings {bare} have no description: kvtier schema and errors show it; use "
            'Field(description="...")',
        )
        shown = sorted(name for name, field in own.items() if _may_show_secret(name, field.annotation))
        expect(
            not shown,
            f"the settings {shown} seem to hold a secret, which errors and logs would show: declare them as "
            "pydantic.SecretStr",
        )

    async def test_what_is_put_is_got(self, place: Path) -> None:
        for chunk_bytes in (self.chunk_bytes, *self.sizes):
            here = place.with_name(f"{place.name}-{chunk_bytes}")
            async with self.opened(here, chunk_bytes=chunk_bytes) as it:
                numbers = (*range(5), *PATTERNED)
                it.expect_kept(await it.put(numbers), f"a put of chunks of {chunk_bytes} bytes")
                it.expect_kept(await it.get(numbers[::-1]), f"a get of chunks of {chunk_bytes} bytes")

    async def test_keys_of_every_length_are_told_apart(self, place: Path) -> None:
        chosen = [pack_key(part, group) for part in _HASHES for group in (0, 1, 2**32 - 1)]
        async with self.opened(place, chunk_bytes=4096) as it:
            batch, slots = it.filled(range(len(chosen)))
            batch = it.batch(chosen, slots)
            it.expect_kept((await it.tier.put(batch)).statuses, "a put under keys of many lengths")
            _, slots = it.empty(range(len(chosen)))
            batch = Batch(chosen, slots.numbers, slots.memory)
            outcome = await it.tier.get(batch)
            it.check_outcome(outcome, batch, "get")
            it.expect_kept(outcome.statuses, "a get under keys of many lengths")
            it.check_given(range(len(chosen)), batch, outcome, (0,))

    async def test_a_large_batch(self, place: Path) -> None:
        async with self.opened(place, chunk_bytes=4096) as it:
            it.expect_kept(await it.put(range(500)), "a put of 500 chunks")
            it.expect_kept(await it.get(range(500)), "a get of 500 chunks")

    async def test_what_was_never_put_is_absent(self, place: Path) -> None:
        async with self.opened(place) as it:
            await it.put([1])
            statuses = await it.get([7, 8])
            expect(set(statuses) == {Status.ABSENT}, f"a get of what was never put: {names_of(statuses)}")
            expect(await it.contains([7, 8]) == [False, False], "contains() says yes to what was never put")
            for call in (it.put, it.get, it.contains):
                expect(await call([]) == [], f"a {call.__name__} of nothing answered with something")
            await it.tier.discard([])
            await it.tier.touch([])

    async def test_a_lookup_may_name_a_key_twice(self, place: Path) -> None:
        async with self.opened(place) as it:
            it.expect_kept(await it.put([1]), "a put")
            found = await it.contains([1, 2, 1, 1])
            expect(found == [True, False, True, True] or self.is_lossy, f"contains() answered {found}")
            await it.tier.touch(keys([1, 1, 9]))
            await it.tier.discard(keys([1, 9, 1]))
            await it.tier.discard(keys([1]))
            expect(await it.get([1]) == [Status.ABSENT], "a discarded chunk is still there")

    async def test_addresses_that_nobody_has_change_no_answer(self, place: Path) -> None:
        async with self.opened(place) as it:
            it.expect_kept(await it.put([1]), "a put")
            found = list(await it.tier.contains_at(keys([1, 2]), ["203.0.113.1:1"]))
            expect(found == [True, False] or self.is_lossy, f"contains_at() answered {found}")

    async def test_the_slots_of_a_put_may_hold_something_else_when_it_has_ended(self, place: Path) -> None:
        async with self.opened(place) as it:
            for version in (0, 1):
                batch, slots = it.filled(range(8), version)
                await it.tier.put(batch)
                slots.reuse()
            await anyio.sleep(self.settle_s)
            it.expect_kept(await it.get(range(8), versions=(0, 1)), "chunks whose slots are used again")
        if self.is_persistent:
            async with self.opened(place) as it:
                it.expect_kept(await it.get(range(8), versions=(0, 1)), "such chunks, opened again")

    async def test_the_slots_of_a_get_may_hold_something_else_when_it_has_ended(self, place: Path) -> None:
        async with self.opened(place) as it:
            await it.put(range(8))
            batch, slots = it.empty(range(10))
            await it.tier.get(batch)
            slots.reuse()
            await anyio.sleep(self.settle_s)
        slots.check_reused("a get")

    async def test_transfers_keep_no_view_of_their_slots(self, place: Path) -> None:
        async with self.opened(place) as it:
            for verb, transfer in (("put", it.tier.put), ("get", it.tier.get)):
                memory = CountedMemory(4, it.chunk_bytes)
                batch = Batch(keys(range(4)), range(4), memory)
                await transfer(it.sealed(batch) if verb == "put" else batch)
                del batch
                for _ in range(_GRACE):
                    if not memory.is_referenced():
                        break
                    await anyio.sleep(self.settle_s)
                else:
                    fail(
                        f"a {verb} that has ended keeps the batch or a view of its slots, which belong to "
                        "other chunks now: copy the bytes that are needed later, and drop the batch"
                    )

    async def test_usage_counts_the_bytes_that_are_kept(self, place: Path) -> None:
        async with self.opened(place) as it:
            it.check_usage()
            it.expect_kept(await it.put(range(_USED_CHUNKS)), "a put")
            await self._expect_used(it, "chunks are kept")
        if self.is_persistent:
            async with self.opened(place) as it:
                await self._expect_used(it, "chunks were kept before the tier was opened again")

    async def test_a_chunk_that_is_put_again_counts_once(self, place: Path) -> None:
        told: list[OffloadKey] = []
        numbers = range(_USED_CHUNKS)
        async with self.rig(self.make_tier(place), place).opened(told.extend) as it:
            it.expect_kept(await it.put(numbers), "a put")
            used_bytes = await self._expect_used(it, "chunks are kept")
            for _ in range(_AGAIN):
                it.expect_kept(await it.put(numbers), "a put of chunks that are there")
            grown_bytes = -1
            for _ in range(_GRACE):
                grown_bytes = (it.check_usage() or 0) - (used_bytes or 0)
                if used_bytes is None or 2 * grown_bytes < _AGAIN * len(numbers) * it.chunk_bytes:
                    break
                await anyio.sleep(self.settle_s)
            else:
                fail(f"usage() grew by {grown_bytes} bytes in {_AGAIN} puts of the same chunks; count once")
            there = [number for number in numbers if await it.get([number]) == [Status.OK]]
        wrong = [number for number in there if key(number) in told]
        expect(
            not wrong, f"TierContext.removed was told of chunks {wrong}, which were put again and are there"
        )

    async def test_a_batch_with_room_for_a_part_accounts_for_each_chunk(self, place: Path) -> None:
        self.require("bounded", "its bound cannot be set")
        told: list[OffloadKey] = []
        rig = self.rig(self.make(self.bounded(place, 16 * self.chunk_bytes)), place)
        async with rig.opened(told.extend) as it:
            statuses = await it.put(range(32))
            await anyio.sleep(self.settle_s)
            it.check_usage()
            found = [(await it.get([number])) == [Status.OK] for number in range(32)]
        for number, (status, is_there) in enumerate(zip(statuses, found, strict=True)):
            if status is Status.OK:
                expect(
                    is_there or key(number) in told or self.is_lossy,
                    f"chunk {number} of a put was OK, and is neither there nor reported: tell "
                    "TierContext.removed what leaves",
                )
            else:
                expect(
                    not is_there, f"chunk {number} of a put ended {status.name}, and is there all the same"
                )

    async def _expect_used(self, it: TierRig, what: str) -> int | None:
        """Wait until ``usage`` counts the chunks of a put; return the bytes, or None if unknown."""
        kept_bytes, used_bytes = _USED_CHUNKS * it.chunk_bytes, it.check_usage()
        for _ in range(_GRACE):  # a tier may ask its backend periodically
            if used_bytes is None or used_bytes >= kept_bytes or self.is_lossy:
                return used_bytes
            await anyio.sleep(self.settle_s)
            used_bytes = it.check_usage()
        return fail(
            f"usage() says that {used_bytes} bytes are used where {what}, {kept_bytes} bytes: "
            "used_bytes counts what the tier keeps; a tier that does not know it answers None",
        )

    async def test_a_full_tier_keeps_to_its_bound_and_tells_what_leaves(self, place: Path) -> None:
        self.require("bounded", "its bound cannot be set")
        capacity_bytes = 16 * self.chunk_bytes
        told: list[OffloadKey] = []
        taken: list[int] = []
        rig = self.rig(self.make(self.bounded(place, capacity_bytes)), place)
        async with rig.opened(told.extend) as it:
            for first in range(0, 48, 4):
                statuses = await it.put(range(first, first + 4))
                taken += [first + index for index, status in enumerate(statuses) if status is Status.OK]
                it.check_usage()
            await anyio.sleep(self.settle_s)
            there = [number for number in range(48) if (await it.get([number])) == [Status.OK]]
            gone = [number for number in taken if number not in there]
            for _ in range(_GRACE):  # chunks that leave during the get are reported a moment later
                if set(keys(gone)) <= set(told):
                    break
                await anyio.sleep(self.settle_s)
            missed = [number for number in gone if key(number) not in told]
        expect(there, f"a tier that may keep {capacity_bytes} bytes keeps no chunk of {self.chunk_bytes}")
        kept_bytes = len(there) * self.chunk_bytes
        expect(kept_bytes <= capacity_bytes, f"{kept_bytes} bytes are kept where {capacity_bytes} may be")
        expect(not missed, f"chunks {missed} have left, and TierContext.removed was not told")

    async def test_known_answers_from_any_thread(self, place: Path) -> None:
        async with self.opened(place) as it:
            await it.put([1])
            wanted = keys([1, 2])
            known = await anyio.to_thread.run_sync(it.tier.known, wanted)
            expect(len(known) == 2, f"known() answered {len(known)} of 2 keys")
            expect(known[0] is not Knowledge.ABSENT or self.is_lossy, "known() says no to what was put")
            expect(known[1] is not Knowledge.PRESENT, "known() says yes to what was never put")


def _may_show_secret(name: str, annotation: object) -> bool:
    """Return whether a setting is unhidden text with a name typical of secrets."""
    words = set(name.split("_"))
    is_named = bool(words & _SECRET_WORDS) or {"access", "key"} <= words or {"api", "key"} <= words
    return is_named and not words & _WHERE_WORDS and annotation in (str, bytes, str | None, bytes | None)
