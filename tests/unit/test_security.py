"""What SECURITY.md says of the sources, of files' modes and of secrets."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from pydantic import SecretStr

from kvtier import Identity, KVCaches, PageRef, TieringConfig, open_manager, pack_key
from kvtier.errors import ConfigError
from kvtier.memory.region import Region
from kvtier.tiers import registry
from kvtier.tiers.base import TierConfig
from kvtier.tiers.dummy import DummyTier

PROJECT = Path(__file__).parents[2]
CODE_FROM_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "jsonpickle"}
SECRET = "correct-horse-battery"


def sources() -> list[Path]:
    found = [*(PROJECT / "kvtier").rglob("*.py"), *(PROJECT / "plugins").glob("*/src/**/*.py")]
    assert len(found) > 50
    return found


def instructions_from_data(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in CODE_FROM_DATA)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in CODE_FROM_DATA:
            yield str(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"eval", "exec", "__import__"}:
                yield node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whole = ast.unparse(node.func)
            unsafe_load = whole == "torch.load" or whole == "os.system"
            if unsafe_load or any(word.arg == "shell" for word in node.keywords):
                yield whole


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from yaml import load", "eval(x)", "subprocess.run(x, shell=True)", "torch.load(x)"],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(instructions_from_data(ast.parse(code)))


def test_no_data_become_code() -> None:
    found = {
        str(path.relative_to(PROJECT)): names
        for path in sources()
        if (names := list(instructions_from_data(ast.parse(path.read_text()))))
    }
    assert not found


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Nothing but the modes that kvtier asks for protects a file."""
    old = os.umask(0)
    yield
    os.umask(old)


def modes_below(root: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"files": set(), "directories": set()}
    for path in root.rglob("*"):
        status = path.lstat()
        kind = "directories" if stat.S_ISDIR(status.st_mode) else "files"
        found[kind].add(stat.S_IMODE(status.st_mode))
    return found


async def store_twice(config: TieringConfig) -> None:
    """Store, reset, and store again."""
    caches = KVCaches((torch.ones((8, 16384), dtype=torch.int8),), ((PageRef(0, 16384),),))
    keys = [pack_key(bytes([index]) * 32) for index in range(4)]
    async with open_manager(config, Identity.make("model", {}), caches) as manager:
        assert await manager.store(keys, blocks=range(4)) == 4
        await manager.reset()
        assert await manager.store(keys, blocks=range(4)) == 4


@pytest.mark.parametrize("file_format", ["files", "segments"])
def test_nobody_else_can_read_what_the_file_tier_keeps(
    file_format: str, tmp_path: Path, no_umask: None
) -> None:
    root = tmp_path / "root"
    tier = {"type": "fs", "root_dir": str(root), "min_free_bytes": 0, "format": file_format}
    config = TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]})
    anyio.run(store_twice, config)
    assert modes_below(root) == {"files": {0o600}, "directories": {0o700}}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_nobody_else_can_read_the_shared_region(tmp_path: Path, no_umask: None) -> None:
    region = Region.open("security-test", slots=4, chunk_bytes=4096, directory=tmp_path)
    try:
        assert modes_below(tmp_path)["files"] == {0o600}
    finally:
        region.close()


class SecretConfig(TierConfig):
    """A tier with a password."""

    password: SecretStr
    port: int = 1


class SecretTier(DummyTier):
    """A tier with a password."""

    Config = SecretConfig  # type: ignore[assignment]


@pytest.fixture
def secret_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load", lambda name, field="type": SecretTier)


def test_a_secret_is_in_no_text_of_the_configuration(secret_tier: None) -> None:
    config = TieringConfig.from_mapping(
        {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "secret", "password": SECRET}]}
    )
    for text in (repr(config), str(config), config.model_dump_json(), repr(config.model_dump())):
        assert SECRET not in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "secret", "password": SECRET, "port": "x"},
        {"type": "secret", "password": [SECRET]},
        {"type": "secret", "pasword": SECRET},
        {"type": "secret", "password": SECRET, "deadline_s": -1},
    ],
)
def test_a_secret_is_in_no_error_of_the_configuration(secret_tier: None, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [wrong]})
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error) + repr(error)
        error = error.__cause__ or error.__context__
