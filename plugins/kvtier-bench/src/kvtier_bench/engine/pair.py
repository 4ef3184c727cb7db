"""Two engines that share a tier: the second engine gets prompts that the first engine has computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier_bench.engine import process
from kvtier_bench.engine.compared import BLOCK_TOKENS, Engine, Sample, Settings

OUTPUT_TOKENS: Final = 8
_FEW_STEPS = [[2, 3]]  # a prompt shorter than a block

Prompts = Sequence[Sequence[int]]


class Way(NamedTuple):
    """The way in which the second engine gets the first engine's chunks.

    Attributes:
        settings: settings of each engine's connector.
        source: address of the first engine, sent as a hint with each prompt of the second engine; None for no
            hints.
        is_stepped: whether the first engine serves its peer only during its own engine steps.
    """

    settings: tuple[Settings, Settings]
    source: str | None = None
    is_stepped: bool = False


class Pair:
    """Two running engines.

    Args:
        way: their settings.
        folder: folder for a file that keeps the first engine stepping.
    """

    def __init__(self, way: Way, first: Engine, second: Engine, folder: Path) -> None:
        self.first = first
        self.second = second
        self._way = way
        self._steps = folder / f"{first.pid} steps"

    def ask(self, engine: Engine, prompts: Prompts) -> Sample:
        """Send prompts to an engine, one after the other, and wait until its transfers have ended."""
        return self._sample(engine, prompts, engine.ask("generate", **_order(prompts)))

    def fetch(self, prompts: Prompts, meanwhile: Callable[[], object] = lambda: None) -> Sample:
        """Send the second engine prompts whose chunks the first engine has.

        Args:
            meanwhile: called while the second engine works.
        """
        order: dict[str, Any] = {"do": "generate", **_order(prompts)}
        if self._way.source is not None:
            arguments = {"source": self._way.source, **_order(prompts)}
            order = {"do": "call", "module": __name__, "function": "generate_hinted", "arguments": arguments}
        with self.steps():
            self.second.tell(**order)
            meanwhile()
            return self._sample(self.second, prompts, self.second.hear(order["do"]))

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Keep the first engine stepping while the context is entered, if its peer depends on its steps."""
        if not self._way.is_stepped or self._steps.exists():
            yield
            return
        self._steps.touch()
        self.first.tell("call", module=__name__, function="step", arguments={"file": str(self._steps)})
        try:
            yield
        finally:
            self._steps.unlink()
            self.first.hear("call")

    def _sample(self, engine: Engine, prompts: Prompts, answer: dict[str, Any]) -> Sample:
        if self._way.is_stepped:  # its connector always reports pending work
            engine.ask("generate", prompts=_FEW_STEPS, output_tokens=OUTPUT_TOKENS)
        else:
            engine.ask("settle")
        counts = {"cached": sum(answer["cached"]), "tokens": sum(map(len, prompts))}
        return Sample(answer["wall_s"], answer["ttft_s"], answer["answers"], counts)


def _order(prompts: Prompts) -> dict[str, Any]:
    return {"prompts": prompts, "output_tokens": OUTPUT_TOKENS, "together": False}


# --- in an engine's process, for the order ``call`` ---------------------------------------------------


def step(llm: Any, file: str) -> dict[str, Any]:
    """Run engine steps while a file exists."""
    while Path(file).exists():
        llm.llm_engine.engine_core.engine_core.step()
    return {}


def generate_hinted(llm: Any, source: str, prompts: Prompts, **order: Any) -> dict[str, Any]:
    """Return the answer of the order ``generate``, with Dynamo's hint attached to each prompt."""
    engine, add = process.Engine(llm), llm.llm_engine.add_request
    answers = []
    for prompt in prompts:
        llm.llm_engine.add_request = partial(add, kv_hints=_hint(llm, source, prompt))
        answers.append(engine.generate({**order, "prompts": [prompt]}))
    llm.llm_engine.add_request = add
    joined = {name: [answer[name][0] for answer in answers] for name in ("ttft_s", "answers", "cached")}
    return {**joined, "wall_s": sum(answer["wall_s"] for answer in answers)}


def _hint(llm: Any, source: str, prompt: Sequence[int]) -> Any:
    """Return the hint that a router attaches to a prompt that ``source`` has computed."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    function = get_hash_fn_by_name(llm.llm_engine.vllm_config.cache_config.prefix_caching_hash_algo)
    hashes, last = [], None
    for at in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = hash_block_tokens(function, last, prompt[at : at + BLOCK_TOKENS], None)
        hashes.append(int.from_bytes(last[-8:], "big"))
    payload = {"source_control_endpoint": source, "block_hashes": hashes, "mode": "copy"}
    return KvHintsEnvelope("0.1", "bench", [KvHintAction("bench", "kv.fetch", "1.0", payload)])
