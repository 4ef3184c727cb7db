"""Distributions created for one test, installed like a third party's; file systems in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest


class InstallDistribution(Protocol):
    """Makes a distribution importable during one test."""

    def __call__(
        self,
        name: str,
        source: str,
        plugins: Mapping[str, str] | None = None,
        version: str = "1.2",
        group: str = "kvtier.tiers",
    ) -> None: ...


@pytest.fixture
def install_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallDistribution]:
    """Install a distribution with one module of the same name; ``plugins`` maps entry points to
    attributes."""
    before = set(sys.modules)

    def install(
        name: str,
        source: str,
        plugins: Mapping[str, str] | None = None,
        version: str = "1.2",
        group: str = "kvtier.tiers",
    ) -> None:
        folder = tmp_path / name
        module = name.replace("-", "_")
        metadata = folder / f"{module}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{entry} = {module}:{attribute}" for entry, attribute in (plugins or {}).items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(folder)

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


GOOD_TIER = """
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from kvtier_testing.dummy import DummyTier
from kvtier.tiers._base import TierConfig


class Login(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    user: str = "nobody"
    token: SecretStr


class Config(TierConfig):
    type: str = Field(default="acme", description="Name of the entry point.")
    root_dir: str = Field(description="Where the files are.")
    mode: Literal["fast", "safe"] = "safe"
    password: SecretStr | None = None
    logins: tuple[Login, ...] = ()

    @field_validator("password", mode="before")
    @classmethod
    def _is_short(cls, value):
        if value is not None and len(value) > 40:
            raise ValueError(f"{value} is too long")
        return value

    @model_validator(mode="after")
    def _fits(self):
        if self.root_dir == "nowhere" and self.password is not None:
            raise ValueError(f"{self.password.get_secret_value()} does not open nowhere")
        return self


class Tier(DummyTier):
    Config = Config
"""


@pytest.fixture
def acme(install_distribution: InstallDistribution) -> None:
    """A third party's well-behaved tier ``acme``, with settings of every kind."""
    install_distribution("acme-tiers", GOOD_TIER, {"acme": "Tier"})


@contextmanager
def mounted_tmpfs(point: Path, options: str) -> Iterator[Path]:
    """Mount an in-memory file system for a while; skip the test if mounting is not allowed."""
    point.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "kvtier-test", str(point)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True)
