"""Check that all tokens stay right under pressure: ``python -m tests.gpu.stress``; exit status 1 if not.

Requests with shared prefixes arrive at once, three times. The device has no room for all of them, so vLLM
preempts. Host memory has no room for all, so chunks come from files. Then a new engine reads the same files.

Batches of another shape round differently, so even an engine without a connector differs from itself.
So an answer may differ from the control's only at a near tie: the control gave the other token nearly the
same probability. Later tokens of that answer are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from kvtier_bench.engine.compared import (
    START_S,
    Engine,
    Settings,
    engine_arguments,
    make_model,
    make_prompt,
    over_files,
    say,
)
from tests.gpu.first_token import ON_GPU

ROOT = Path(__file__).parents[2]
ROUNDS = 3
OUTPUT_TOKENS = 96
ALTERNATIVES = 5
NEAR_TIE = {"float32": 0.02, "bfloat16": 0.25}  # of log-probabilities; a wrong prefix causes a gap of several
ARGUMENTS = {"max_model_len": 2048, "max_num_seqs": 32, "gpu_memory_utilization": 0.15}

Step = Mapping[str, float]
"""Log-probabilities of the likeliest tokens of one step, by token id. The first is the chosen one."""


@dataclass(frozen=True)
class Compared:
    """Comparison of one round's answers with the control's.

    Attributes:
        differ: number of answers that differ.
        gap: greatest difference of the control's log-probabilities where an answer first differs; infinite
            if its token was not among the control's likeliest.
    """

    round: str
    answers: int
    differ: int
    gap: float


def alternatives(llm: Any, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the likeliest tokens of each step of each answer. Called in the engine's process."""
    from kvtier_bench.engine.process import sampling

    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(given, sampling(OUTPUT_TOKENS, logprobs=ALTERNATIVES), use_tqdm=False)
    return {"steps": [_steps(output.outputs[0]) for output in outputs]}


def _steps(answer: Any) -> list[Step]:
    found: list[Step] = []
    for token, of_step in zip(answer.token_ids, answer.logprobs, strict=True):
        chosen = {str(token): of_step[token].logprob}
        found.append(chosen | {str(other): it.logprob for other, it in of_step.items()})
    return found


def gap_at_difference(control: Sequence[Step], answer: Sequence[int]) -> float | None:
    """Return how much likelier the control's token was at the first difference; None if there is none."""
    for step, token in zip(control, answer, strict=True):
        chosen = next(iter(step))
        if chosen != str(token):
            return abs(step[chosen] - step[str(token)]) if str(token) in step else inf
    return None


def compare(
    name: str, control: Mapping[Any, Sequence[Step]], answers: Mapping[Any, Sequence[int]]
) -> Compared:
    """Compare the answers of a round with the control's."""
    gaps = [gap_at_difference(control[prompt], answer) for prompt, answer in answers.items()]
    differ = [gap for gap in gaps if gap is not None]
    return Compared(name, len(answers), len(differ), max(differ, default=0.0))


def make_rounds(requests: int) -> list[list[list[int]]]:
    """Return the prompts of each round: the same ones in another order, two thirds with shared prefixes."""
    generator = random.Random(7)
    shared = [make_prompt(f"shared {number}", 600) for number in range(4)]
    prompts = []
    for number in range(requests):
        prefix = shared[number % 4] if number % 3 else []
        prompts.append(make_prompt(f"own {number}", len(prefix) + generator.randrange(60, 900), prefix))
    return [generator.sample(prompts, len(prompts)) for _ in range(ROUNDS)]


class Stress:
    """The engines of one run, each in its own process."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder = folder
        self._model = make_model(folder, args.size)
        self._rounds = make_rounds(args.requests)
        self._blocks = args.device_blocks
        self._dtype = args.dtype

    def run(self) -> tuple[list[Compared], dict[str, Any]]:
        """Return the differences, and counts of the engines."""
        counts: dict[str, Any] = {}
        with self._engine("control", None) as engine:
            arguments = {"prompts": self._rounds[0]}
            found = engine.ask(
                "call", module="tests.gpu.stress", function="alternatives", arguments=arguments
            )
            control = dict(zip(map(tuple, self._rounds[0]), found["steps"], strict=True))
            compared = self._ask(engine, "control again", control, self._rounds[1:])
            counts["control"] = _counts(engine)
        kvtier = {**over_files(96 * 2**20, self._folder / "files"), "block_size": 64}
        for name, rounds in (("kvtier", self._rounds), ("kvtier after a restart", self._rounds[:1])):
            with self._engine(name, kvtier) as engine:
                compared += self._ask(engine, name, control, rounds)
                counts[name] = _counts(engine)
        return compared, counts

    def _engine(self, name: str, settings: Settings | None) -> Engine:
        """Return a ready engine."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        engine = Engine(name, self._folder, variables={"PYTHONPATH": path})
        engine.ask("load", START_S)
        on_gpu = ON_GPU | ARGUMENTS | {"dtype": self._dtype, "num_gpu_blocks_override": 2 * self._blocks}
        arguments = engine_arguments(
            self._model, settings, ARGUMENTS | {"num_gpu_blocks_override": self._blocks}
        )
        engine.ask("start", START_S, arguments=arguments, on_gpu=on_gpu)
        say(f"{name}: engine ready")
        return engine

    def _ask(
        self,
        engine: Engine,
        name: str,
        control: Mapping[Any, Sequence[Step]],
        rounds: Sequence[Sequence[Sequence[int]]],
    ) -> list[Compared]:
        compared = []
        for number, prompts in enumerate(rounds, 1):
            got = engine.ask("generate", prompts=prompts, output_tokens=OUTPUT_TOKENS)
            answers = dict(zip(map(tuple, prompts), got["answers"], strict=True))
            compared.append(compare(f"{name}, round {number}", control, answers))
            say(str(compared[-1]))
        engine.ask("settle")
        return compared


def _counts(engine: Engine) -> dict[str, float]:
    """Return preemptions and loaded chunks by tier, and end the engine."""
    found: dict[str, float] = {}
    for name, labels, value in engine.ask("metrics")["samples"]:
        if name == "vllm:num_preemptions_total":
            found["preemptions"] = found.get("preemptions", 0) + value
        elif name == "kvtier_loaded_chunks_total":
            found[f"from {labels['tier']}"] = value
    engine.ask("stop")
    return found


def main() -> None:
    """Print one JSON document; exit with status 1 if a token is wrong, or no chunk came from a tier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=tuple(NEAR_TIE), default="float32")
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--device-blocks", type=int, default=160, help="blocks of 32 tokens [160]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        compared, counts = Stress(Path(name), args).run()
    print(json.dumps({"Compared": [asdict(it) for it in compared], "counts": counts}, indent=1))
    served = counts["kvtier"].get("from cpu") and counts["kvtier after a restart"].get("from fs")
    if max(it.gap for it in compared) > NEAR_TIE[args.dtype] or not served:
        sys.exit(1)


if __name__ == "__main__":
    main()
