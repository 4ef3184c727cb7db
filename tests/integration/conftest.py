"""Real engines on the CPU, and tiny models made for each test run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from kvtier_bench.engine.compared import MODELS, environment
from tests.integration.harness import OUTPUT_TOKENS, Engine, Launcher, Tokens, vllm_release

ENVIRONMENT = {
    **environment(),
    # The same in every run: with another number of threads the numerics, and so the tokens, can differ. Tiny
    # models are as fast with one thread, and faster if the cores are busy.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

LLAMA = dict(MODELS["tiny"])
"""A model whose blocks take 128 KiB in float32. Its answers depend on the whole prompt."""


def from_vllm(release: tuple[int, int], why: str) -> pytest.MarkDecorator:
    """Skip on older releases of vLLM that lack a feature the test needs, with or without kvtier."""
    older = importlib.util.find_spec("vllm") is not None and vllm_release() < release
    return pytest.mark.skipif(older, reason=f"vLLM before {release[0]}.{release[1]} {why}")


def in_full(*values: Any) -> ParameterSet:
    """Return test parameters that run on some commits only."""
    return pytest.param(*values, marks=pytest.mark.full)


VLLM_LINE = re.compile(r"\(\w+ pid=\d+\) (INFO|WARNING)|\s*$|Loading safetensors|.*(Warning: |dispatcher)")

Ask = Callable[..., list[Tokens]]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))  # the first one starts the shared processes


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The process that engines are forked from."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; nox -s integration installs it")
    with Launcher(tmp_path_factory.mktemp("engines"), ENVIRONMENT) as launcher:
        yield launcher


@pytest.fixture(autouse=True)
def _show_what_engines_said(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print the logs and metrics of a test's engines, without vLLM's own lines; pytest shows them if it
    fails."""
    if "launcher" not in request.fixturenames:
        yield
        return
    launcher: Launcher = request.getfixturevalue("launcher")
    earlier = len(launcher.engines)
    yield
    for engine in launcher.engines[earlier:]:
        lines = [line for line in engine.log().splitlines() if not VLLM_LINE.match(line)]
        print(f"--- engine {engine.pid}", *lines, engine.last, sep="\n")


@pytest.fixture(scope="session")
def make_llama(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a tiny Llama-style model in the given directory, or in one of its own."""

    def make(directory: Path | None = None, seed: int = 1, **fields: Any) -> Path:
        directory = directory or tmp_path_factory.mktemp("models") / "tiny"
        return launcher.make_model(directory, "LlamaConfig", "LlamaForCausalLM", {**LLAMA, **fields}, seed)

    return make


@pytest.fixture(scope="session")
def llama(make_llama: Callable[..., Path]) -> Path:
    """The model that most tests run."""
    return make_llama()


@pytest.fixture(scope="session")
def reference_engine(launcher: Launcher, llama: Path) -> Iterator[Engine]:
    """An engine that computes every prompt in full: no connector, no prefix cache."""
    with launcher.start(llama, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference(reference_engine: Engine) -> Ask:
    """Return the model's answer to each prompt when nothing is reused."""
    known: dict[tuple[int, ...], Tokens] = {}

    def ask(*prompts: Sequence[int], output_tokens: int = OUTPUT_TOKENS) -> list[Tokens]:
        keys = [(output_tokens, *prompt) for prompt in prompts]
        for key in keys:
            if key not in known:
                (known[key],) = reference_engine.generate(key[1:], output_tokens=output_tokens)
        return [known[key] for key in keys]

    return ask


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of a primary tier with room for 512 chunks, over files."""
    files = {"type": "fs", "root_dir": str(tmp_path / "root")}
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [files]}
