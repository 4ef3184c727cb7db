"""The check of the engine's interface names what has moved: planted one by one into a made-up engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.contract import Terms, misses

ENGINE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

SEED = "seed"

class Answer(Enum):
    HIT = 1
    MISS = 2

@dataclass
class Cache:
    blocks_per_chunk: int

@dataclass
class Config:
    cache: Cache
    groups: tuple[Cache, ...]
    name: str
    extra: dict[str, str]

@dataclass
class Output:
    keys: list[bytes]
    evicted: list[bytes]

class Place:
    def __init__(self, block_ids: list[int]):
        self.block_ids = block_ids

class Manager(ABC):
    @abstractmethod
    def lookup(self, key: bytes, context: str) -> Answer: ...

    def prepare(self, place: Place, success: bool = True) -> Output | None:
        return None

    def on_step(self) -> None:
        return

    def lock(self) -> None:
        return

class Factory:
    @classmethod
    def register(cls, name: str, module: str) -> None: ...

class Connector:
    def __init__(self, config: Config, role: str) -> None: ...
"""

ADAPTER = """
from __future__ import annotations

from made_up_engine.base import Answer, Config, Factory, Manager, Output, Place

def register() -> None:
    Factory.register("name", module="module")

def seed() -> str:
    from made_up_engine import base

    return str(getattr(base, "SEED", None))

class Mine(Manager):
    def __init__(self, config: Config) -> None:
        self._config = config
        cache = config.cache
        self._blocks = [cache.blocks_per_chunk, *(group.blocks_per_chunk for group in config.groups)]

    def lookup(self, key: bytes, context: str) -> Answer:
        return Answer.HIT if self._config.extra else Answer.MISS

    def prepare(self, place: Place, success: bool = True, expedited: bool = False) -> Output | None:
        return Output(keys=[bytes(place.block_ids)], evicted=[])

    def on_step(self) -> None:
        return

    def on_flushed(self) -> None:
        return

    def report(self) -> None:
        return
"""

BASE = "made_up_engine.base"
TERMS = Terms(
    since={f"{BASE}.Manager.on_flushed": (0, 33), f"{BASE}.Manager.prepare.expedited": (0, 33)},
    also=[f"{BASE}.Connector.__init__(config, role)"],
    hooks=[f"{BASE}.Manager"],
    complete=[f"{BASE}.{name}" for name in ("Config", "Cache", "Output")],
    left={f"{BASE}.Config.name": "not needed", f"{BASE}.Manager.lock": "not needed"},
    own=["report"],
)

Check = Callable[..., list[str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Write the engine and the adapter with one change, import them and check."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_and_check(
        old: str = "", new: str = "", *, adapter: str = ADAPTER, version: tuple[int, int] = (0, 32)
    ) -> list[str]:
        assert not old or ENGINE.count(old) == 1, f"{old!r} is not in the engine once"
        (tmp_path / "made_up_engine").mkdir()
        (tmp_path / "made_up_engine/__init__.py").touch()
        (tmp_path / "made_up_engine/base.py").write_text(ENGINE.replace(old, new) if old else ENGINE)
        (tmp_path / "made_up_adapter.py").write_text(adapter)
        importlib.invalidate_caches()
        return misses(["made_up_adapter"], "made_up_engine", version, TERMS)

    yield write_and_check
    for name in [name for name in sys.modules if name.startswith("made_up_")]:
        del sys.modules[name]


def test_an_engine_that_is_as_the_adapter_takes_it_to_be(check: Check) -> None:
    assert check() == []


@pytest.mark.parametrize(
    ("old", "new", "sentences"),
    [
        ('SEED = "seed"', "", [f"{BASE}.SEED: is gone"]),
        ("    HIT = 1", "    FOUND = 1", [f"{BASE}.Answer.HIT: is gone"]),
        (
            "    blocks_per_chunk: int",
            "    blocks: int",
            [
                f"{BASE}.Cache.blocks: is neither used nor left on purpose",
                f"{BASE}.Cache.blocks_per_chunk: is gone",
            ],
        ),
        (
            "    extra: dict[str, str]",
            "    extra: dict[str, str]\n    layout: str = ''",
            [f"{BASE}.Config.layout: is neither used nor left on purpose"],
        ),
        (
            "    evicted: list[bytes]",
            "    removed: list[bytes]",
            [
                f"{BASE}.Output.removed: is neither used nor left on purpose",
                f"{BASE}.Output: parameter evicted is gone",
            ],
        ),
        ("self.block_ids = block_ids", "self.ids = block_ids", [f"{BASE}.Place.block_ids: is gone"]),
        (
            "def prepare(self, place: Place, success: bool = True)",
            "def prepare(self, success: bool = True)",
            [f"{BASE}.Manager.prepare: parameter place is gone"],
        ),
        (
            "def lookup(self, key: bytes, context: str)",
            "def lookup(self, context: str, key: bytes)",
            [f"{BASE}.Manager.lookup: the parameters have another order, context, key"],
        ),
        (
            "def lookup(self, key: bytes, context: str)",
            "def lookup(self, key: bytes, context: str, tier: str = '')",
            [f"{BASE}.Manager.lookup: parameter tier is new, and not taken"],
        ),
        (
            "def lookup(self, key: bytes, context: str)",
            "def lookup(self, key: bytes, context: str = '')",
            [f"{BASE}.Manager.lookup: parameter context can be left out or be positional, and here not"],
        ),
        (
            "def on_step(self) -> None:\n        return",
            "def on_end(self) -> None:\n        return",
            [
                f"{BASE}.Manager.on_end: is neither defined nor left on purpose",
                f"{BASE}.Manager.on_step: is gone",
            ],
        ),
        (
            "    def on_step(self)",
            "    @abstractmethod\n    def must(self) -> None: ...\n\n    def on_step(self)",
            [
                f"{BASE}.Manager.must: is abstract, and Mine does not define it",
                f"{BASE}.Manager.must: is neither defined nor left on purpose",
            ],
        ),
        (
            "def register(cls, name: str, module: str)",
            "def register(cls, name: str, path: str)",
            [f"{BASE}.Factory.register: parameter module is gone"],
        ),
        (
            "def register(cls, name: str, module: str)",
            "def register(cls, name: str, module: str, kind: str)",
            [f"{BASE}.Factory.register: cannot be called so: missing a required argument: 'kind'"],
        ),
        (
            "def __init__(self, config: Config, role: str)",
            "def __init__(self, config: Config)",
            [f"{BASE}.Connector.__init__: parameter role is gone"],
        ),
    ],
    ids=lambda value: value[0].partition(":")[0] if isinstance(value, list) else "",
)
def test_what_has_moved_is_named(check: Check, old: str, new: str, sentences: list[str]) -> None:
    assert check(old, new) == sentences


def test_a_later_hook_is_wanted_from_its_version_on(check: Check) -> None:
    assert check(version=(0, 33)) == [
        f"{BASE}.Manager.on_flushed: is gone",
        f"{BASE}.Manager.prepare.expedited: is gone",
        f"{BASE}.Manager.prepare: parameter expedited is gone",
    ]


def test_what_is_left_on_purpose_is_not_used(check: Check) -> None:
    adapter = ADAPTER.replace("config.cache\n", "config.cache\n        self._name = config.name\n")
    assert check(adapter=adapter) == [f"{BASE}.Config.name: is left on purpose, and used"]


def test_a_name_that_cannot_be_imported_any_more(check: Check) -> None:
    adapter = ADAPTER + "\n\ndef later() -> None:\n    from made_up_engine.moved import Thing\n"
    assert check(adapter=adapter) == ["made_up_engine.moved.Thing: is gone"]


def test_records_are_made_with_named_arguments(check: Check) -> None:
    adapter = ADAPTER.replace("Output(keys=[bytes(place.block_ids)], evicted=[])", "Output([], [])")
    (sentence,) = [one for one in check(adapter=adapter) if "named" in one]
    assert sentence == f"{BASE}.Output: is made with arguments that are not named, so a move would not show"
