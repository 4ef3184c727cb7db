"""The file tier against a dict: two openers on one root, resets, damage and loss, in any order."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier._identity import Identity
from kvtier._memory.heap import HeapMemory
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers._base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs._layout import chunk_path, data_dir
from tests.effort import effort

CHUNKS = 6
CHUNK_BYTES = 8192
IDENTITY = Identity.make("model", {"dtype": "bfloat16"})
KEYS = [OffloadKey(pack_key(hashlib.sha256(bytes([n])).digest(), n % 2)) for n in range(CHUNKS)]
CONTENTS = [random.Random(n).randbytes(CHUNK_BYTES) for n in range(CHUNKS)]
numbers = st.sets(st.integers(0, CHUNKS - 1), min_size=1).map(sorted)
openers = st.integers(0, 1)


class FsMachine(RuleBasedStateMachine):
    """The truth: for each epoch, which chunks have a file, and whether it is "whole", "bad" or "short"."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvtier-state-"))
        self.runner = asyncio.Runner()
        self.files: dict[int, dict[int, str]] = {}
        self.epoch = 0
        self.epochs = [0, 0]
        self.tiers = [self.opened(), self.opened()]

    def teardown(self) -> None:
        for tier in self.tiers:
            self.runner.run(tier.aclose())
        self.runner.close()
        shutil.rmtree(self.root)

    def opened(self) -> FsTier:
        config = FsConfig(
            root_dir=self.root, n_threads=1, min_free_bytes=0, max_bytes=2**50, direct_io="never"
        )
        tier = FsTier(config)
        self.runner.run(tier.open(TierContext("files", IDENTITY, CHUNK_BYTES)))
        return tier

    def seen_by(self, opener: int) -> dict[int, str]:
        return self.files.setdefault(self.epochs[opener], {})

    def path(self, opener: int, number: int) -> Path:
        return self.root / chunk_path(data_dir(IDENTITY.namespace, self.epochs[opener]), KEYS[number])

    @rule(opener=openers, chosen=numbers)
    def put(self, opener: int, chosen: list[int]) -> None:
        memory = HeapMemory(CHUNKS, CHUNK_BYTES)
        for number in chosen:
            memory.view(number)[:] = CONTENTS[number]
        batch = Batch([KEYS[number] for number in chosen], chosen, memory)
        outcome = self.runner.run(self.tiers[opener].put(batch))
        assert outcome.statuses == (Status.OK,) * len(chosen)
        files = self.seen_by(opener)
        for number in chosen:
            if files.get(number) != "bad":  # only the length of what is there is looked at
                files[number] = "whole"

    @rule(opener=openers, chosen=numbers)
    def get(self, opener: int, chosen: list[int]) -> None:
        batch = Batch([KEYS[number] for number in chosen], chosen, HeapMemory(CHUNKS, CHUNK_BYTES))
        outcome = self.runner.run(self.tiers[opener].get(batch))
        files = self.seen_by(opener)
        for number, status, view in zip(chosen, outcome.statuses, batch.views, strict=True):
            found = files.get(number)
            expected = {"whole": Status.OK, None: Status.ABSENT}.get(found, Status.CORRUPT)
            assert status is expected
            if status is Status.OK:
                assert bytes(view) == CONTENTS[number]
            if status is Status.CORRUPT:
                del files[number]

    @rule(opener=openers, chosen=numbers)
    def discard(self, opener: int, chosen: list[int]) -> None:
        self.runner.run(self.tiers[opener].discard([KEYS[number] for number in chosen]))
        for number in chosen:
            self.seen_by(opener).pop(number, None)

    @rule(opener=openers)
    def reset(self, opener: int) -> None:
        self.runner.run(self.tiers[opener].reset())
        self.epochs[opener] = self.epoch + 1  # for this opener alone: who opens later has yet another one
        self.epoch += 2

    @rule(opener=openers)
    def open_again(self, opener: int) -> None:
        self.runner.run(self.tiers[opener].aclose())
        self.tiers[opener] = self.opened()
        self.epochs[opener] = self.epoch

    @rule(opener=openers, number=st.integers(0, CHUNKS - 1), offset=st.integers(0, CHUNK_BYTES + 127))
    def flip_a_bit(self, opener: int, number: int, offset: int) -> None:
        if self.seen_by(opener).get(number) != "whole":
            return
        with self.path(opener, number).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        self.seen_by(opener)[number] = "bad"

    @rule(opener=openers, number=st.integers(0, CHUNKS - 1), length=st.integers(0, CHUNK_BYTES + 4095))
    def cut(self, opener: int, number: int, length: int) -> None:
        if number not in self.seen_by(opener):
            return
        with self.path(opener, number).open("r+b") as file:
            file.truncate(length)
        self.seen_by(opener)[number] = "short"

    @rule(opener=openers, number=st.integers(0, CHUNKS - 1))
    def lose(self, opener: int, number: int) -> None:
        if self.seen_by(opener).pop(number, None) is not None:
            self.path(opener, number).unlink()

    @rule(opener=openers)
    def lose_all(self, opener: int) -> None:
        if self.seen_by(opener):
            shutil.rmtree(self.root / data_dir(IDENTITY.namespace, self.epochs[opener]))
            self.seen_by(opener).clear()

    @invariant()
    def everything_that_has_a_file_is_found(self) -> None:
        for opener in (0, 1):
            found = self.runner.run(self.tiers[opener].contains(KEYS))
            assert list(found) == [number in self.seen_by(opener) for number in range(CHUNKS)]


@pytest.mark.timeout(300)
def test_the_tier_agrees_with_a_dict() -> None:
    limits = settings(
        max_examples=effort(5, 25),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    FsMachine.TestCase.settings = limits
    FsMachine.TestCase("runTest").debug()
