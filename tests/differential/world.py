"""Runs a life on real engines, and judges it by an engine that reuses nothing."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier_bench.engine.compared import EngineError, make_prompt
from tests.differential.driver import DEADLOCK
from tests.differential.judges import wrong_counters, wrong_events
from tests.differential.lives import BESIDE_A_TRANSPORT, Ask, Case, Life, Piece, Probe, Round
from tests.differential.models import Model, adapter
from tests.differential.plan import ENOUGH, Plan
from tests.integration.harness import TWO_RANKS, Engine, Launcher, Tokens, misplace_chunks, patient
from tests.integration.router import Router

TOLERANCE = 2e-3
"""Tolerance between logprobs of equal tokens, computed in float32 in steps of other sizes."""

DRIVER = "tests.differential.driver"
_FORGET = {"module": "kvtier_bench.engine.process", "function": "forget"}
_CONTROL = (130, 300, 500)
_KINDS = {"AssertionError": "rest", DEADLOCK: DEADLOCK}


class Failure(Exception):
    """A life went wrong.

    Attributes:
        kind: ``tokens``, ``engine``, ``rest``, ``counters``, ``events`` or ``hits``.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Unfit(Exception):
    """A model or a configuration proves nothing, or the engine refuses it."""


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        ask: the request.
        text: all tokens before the answer.
        tokens: the answer's tokens.
        logprobs: the engine's own log-probabilities.
        weights: the number of the model's weights at each token; each reset loads new ones.
    """

    ask: Ask
    text: Tokens
    tokens: Tokens
    logprobs: Sequence[float]
    weights: Sequence[int]


class Stage:
    """A model, and the engine that judges other engines' answers. A context manager.

    Args:
        launcher: starts engines.
        folder: the folder of the model and the tiers' files.
        model: the model to make.
        bug: one of ``tests.differential.mutations``, to plant in each engine with kvtier.

    Attributes:
        loaded: number of chunks that engines of the last life loaded, by tier.

    Raises:
        Unfit: the model's answers do not depend on its cache.
    """

    def __init__(self, launcher: Launcher, folder: Path, model: Model, bug: str = "") -> None:
        self.launcher, self.folder, self.bug = launcher, folder, bug
        self.directory = model.make(launcher, folder)
        self.more = model.arguments(launcher, self.directory)
        self.loaded: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._run: Run | None = None
        self._scores: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        judge = {key: value for key, value in self.more.items() if key != "speculative_config"}
        judge |= {"num_gpu_blocks_override": 200, "max_model_len": 1280, "enable_prefix_caching": False}
        self._judge = self.start(**judge)
        try:
            self.bytes_per_token = self._control()
        except BaseException:
            self._judge.kill()
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()
        self._judge.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, settings: Mapping[str, Any] | None = None, **arguments: Any) -> Engine:
        """Start an engine of the model. See ``Launcher.start`` and ``driver.prepare``."""
        bug = self.bug if "kv_transfer_config" in arguments else ""
        copy_s, environment = arguments.pop("copy_s", 0), arguments.pop("environment", {})
        arguments["prepare"] = {"module": DRIVER, "function": "prepare", "bug": bug, "copy_s": copy_s}
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
        return self.launcher.start(self.directory, settings, environment=environment, **arguments)

    def _control(self) -> float:
        """Return a chunk's bytes per token, after a check that the judge detects wrong answers."""
        prompts = [make_prompt(seed, tokens) for seed, tokens in enumerate(_CONTROL)]
        asks = [Ask(0, ()) for _ in prompts]
        room = {"num_gpu_blocks_override": 200, "max_model_len": 1024, **self.more}
        with self.start({"cpu_bytes_to_use": "64MiB"}, **room) as engine:
            engine.generate(*prompts)
            slots = engine.settled().value("kvtier_slots")
            misplace_chunks(engine)
            engine.call(**_FORGET)
            orders = [self.order(ask, [one]) for ask, one in zip(asks, prompts, strict=True)]
            heard = _play(engine, orders)["heard"]
            nbytes = engine.last.value("kvtier_tier_capacity_bytes", tier="cpu") / slots / 32
        said = [
            _said(ask, prompt, one["turns"][0]) for ask, prompt, one in zip(asks, prompts, heard, strict=True)
        ]
        right = [one for one in said if not self.wrong([one])]
        if right:
            raise Unfit(f"{len(right)} of {len(said)} answers are right with wrong bytes")
        return nbytes

    # --- living ----------------------------------------------------------------------------------

    def check(self, life: Life, *, connector: bool = True, warm: bool = False) -> None:
        """Run a life and judge it.

        Args:
            connector: whether the engine has a connector.
            warm: run it in the previous life's engines if their case is equal.

        Raises:
            Failure: a judge objects.
        """
        self.loaded.clear()
        run = self._run
        if not (warm and run is not None and (run.case, run.bug) == (life.case, self.bug)):
            self._leave()
            folder = self.folder / f"engine-{next(self._numbers)}"
            self._run = run = Run(self, life.case, folder, connector=connector)
        try:
            run.live(life)
            if wrong := self.wrong(run.said):
                raise Failure("tokens", "\n".join(wrong))
        except EngineError as error:
            self._leave()
            kind = next((kind for sign, kind in _KINDS.items() if sign in str(error)), "engine")
            raise Failure(kind, str(error)) from error
        except BaseException:
            self._leave()
            raise
        if not warm:
            self._leave()

    def failure(self, life: Life, **how: bool) -> Failure | None:
        """Return the failure of a life, if any. See ``check``."""
        try:
            self.check(life, **how)
        except Failure as failure:
            return failure
        return None

    def _leave(self) -> None:
        """Kill the engines that a life left running."""
        if self._run is not None:
            self._run.end()
        self._run = None

    def wrong(self, said: Iterable[Said]) -> list[str]:
        """Describe the answers that the model would not give."""
        said = [one for one in said if one.tokens]
        for weights in sorted({number for one in said for number in one.weights}):
            self._score([one for one in said if weights in one.weights], weights)
        scores = [{number: self._scores[_key(one, number)] for number in one.weights} for one in said]
        return list(filter(None, map(_wrong, said, scores)))

    def _score(self, said: Sequence[Said], weights: int) -> None:
        """Let the judge score answers with these weights."""
        new = {key: one for one in said if (key := _key(one, weights)) not in self._scores}
        orders = [
            {"text": one.text + one.tokens, "start": len(one.text), **self._adapter(one.ask)}
            for one in new.values()
        ]
        if orders:
            self._judge.call("reweigh", module=DRIVER, weights=weights)
            answer = self._judge.call("score", module=DRIVER, orders=orders)
            self._scores.update(zip(new, answer["scores"], strict=True))

    def _adapter(self, ask: Ask) -> dict[str, Any]:
        return {"adapter": ask.adapter, "adapter_path": str(adapter(self.directory, ask.adapter))}

    def order(self, ask: Ask, inputs: Sequence[Tokens]) -> dict[str, Any]:
        """Return a request in the form that ``driver.play`` accepts."""
        says = [ask.say, *(say for _, say in ask.more)]
        fields = ("name", "at", "abort", "salt", "priority", "prompt_logprobs", "hint", "eager")
        return {
            **{name: getattr(ask, name) for name in fields},
            **self._adapter(ask),
            "inputs": list(zip(inputs, says, strict=True)),
        }


def _key(said: Said, weights: int) -> tuple[int, ...]:
    return (weights, said.ask.adapter, len(said.text), *said.text, *said.tokens)


def _said(ask: Ask, text: Tokens, turn: Mapping[str, Any]) -> Said:
    return Said(ask, text, turn["said"], turn["logprobs"], turn["weights"])


def _wrong(said: Said, scores: Mapping[int, Sequence[Sequence[float]]]) -> str:
    for place, (mine, weights) in enumerate(zip(said.logprobs, said.weights, strict=False)):
        its, best = scores[weights][place]
        if its < best - TOLERANCE or abs(mine - its) > TOLERANCE:
            return (
                f"request {said.ask.name}: token {place} behind {len(said.text)} tokens has logprob "
                f"{mine:.4f} by the engine, {its:.4f} by the model, whose likeliest has {best:.4f}"
            )
    return ""


class Run:
    """Engines of a case, and the life that runs in them.

    Attributes:
        case: the engines' configuration.
        bug: the planted bug, if any.
        said: all answers of this life so far.
    """

    def __init__(self, stage: Stage, case: Case, folder: Path, *, connector: bool) -> None:
        self.case, self.bug = case, stage.bug
        self.said: list[Said] = []
        self._stage, self._folder, self._connector = stage, folder, connector
        self._engines: dict[int, Engine] = {}
        self._loaded: dict[int, Counter[str]] = {}
        self._texts: dict[int, Tokens] = {}
        self._routers: dict[int, Router] = {}
        self._weights: Counter[int] = Counter()  # of each engine's model
        self._new_weights = itertools.count(1)

    def end(self) -> None:
        """Kill the running engines, and remove their files."""
        for engine in self._engines.values():
            engine.kill()
        for router in self._routers.values():
            router.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def live(self, life: Life) -> None:
        """Run all rounds of a life."""
        self.said = []
        for each in life.rounds:
            self._round(each)
        for number in sorted(self._engines):
            self._rest(number)
        is_judged = self._connector and not self.case.lacks_parts and self.case.connector != "blind"
        if is_judged and not self._stage.loaded and (planned := Plan(life).loads) >= ENOUGH:
            raise Failure("hits", f"nothing was loaded, not about {planned} chunks")
        if life.probe is not None and self._connector:
            self._probe(life.probe)

    def _round(self, each: Round) -> None:
        engine = self._engine(each.engine)
        if each.before in ("restart", "kill"):
            self._note_loaded(engine)
            engine.stop() if each.before == "restart" else engine.kill()
            del self._engines[each.engine]
            engine = self._engine(each.engine)
        elif each.before:
            engine.settled()
            if each.before != "settle":
                engine.call(**_FORGET)
            if each.before == "reset" and engine.call("reset", connector=True)["done"]:
                self._weights[engine.pid] = weights = next(self._new_weights)
                engine.call("reweigh", module=DRIVER, weights=weights)
        self._ask(engine, each.asks, each.resets)

    def _ask(self, engine: Engine, asks: Sequence[Ask], resets: Sequence[Any] = ()) -> list[int]:
        """Send requests and keep the answers. Return how many tokens of each prompt were cached."""
        orders = []
        for ask in asks:
            before = [] if ask.after is None else self._texts[ask.after][: ask.keep]
            first = self._texts[ask.name] = before + tokens_of(ask.pieces)
            orders.append(self._stage.order(ask, [first, *(tokens_of(text) for text, _ in ask.more)]))
        new = [next(self._new_weights) for _ in resets]
        answer = _play(engine, orders, resets, self._weights[engine.pid], new)
        self._weights[engine.pid], heard = answer["weights"], answer["heard"]
        for ask, order, one in zip(asks, orders, heard, strict=True):
            text: Tokens = []
            for (given, _), turn in zip(order["inputs"], one["turns"], strict=False):
                # A session keeps all tokens of an answer but the last one, which was not computed.
                text = text[: len(text) - bool(text)] + given
                self.said.append(_said(ask, text, turn))
                text = text + turn["said"]
            self._texts[ask.name] = text
        return [one["cached"] or 0 for one in heard]

    def _rest(self, number: int) -> None:
        if self._connector:
            engine = self._engines[number]
            engine.settled()
            self._note_loaded(engine)
            ready = {(chunk, group) for chunk, group in engine.call("rest", module=DRIVER)["ready"]}
            if wrong := wrong_counters(engine.last, self.case.tiers):
                raise Failure("counters", str(wrong))
            if self.case.connector == "blind" and (stored := engine.last.value("kvtier_stored_chunks")):
                raise Failure("counters", f"{stored:.0f} chunks stored beside a transport that is not seen")
            router = self._routers.get(engine.pid)
            if router is not None and (told := wrong_events(router, engine, ready)):
                raise Failure("events", told)

    def _note_loaded(self, engine: Engine) -> None:
        loaded = Counter(engine.metrics().loaded())
        self._stage.loaded += loaded - self._loaded.get(engine.pid, Counter())
        self._loaded[engine.pid] = loaded

    # --- hits ------------------------------------------------------------------------------------

    def _probe(self, probe: Probe) -> None:
        """Send a new prompt until it is stored, then others; check how much of it host memory still has."""
        engine = self._engine(0)
        asked = Ask(0, ((-1, probe.tokens),), say=1)
        for ask in [
            *[asked] * probe.times,
            *([Ask(0, ((-2, probe.others),), say=1)] if probe.others else []),
        ]:
            engine.settled()
            engine.call(**_FORGET)
            self._ask(engine, [ask])
        engine.settled()
        engine.call(**_FORGET)
        (cached,) = self._ask(engine, [replace(asked, hint={"kv_load_tiers": []})])
        least = self._least(probe, int(engine.last.value("kvtier_slots")))
        if cached < least:
            raise Failure("hits", f"{cached} of {probe.tokens} tokens are in host memory, not {least}")

    def _least(self, probe: Probe, slots: int) -> int:
        """Return the fewest tokens that any policy must find again: half as many as LRU."""
        if self.case.connector == "blind" or self.case.lacks_parts:
            return 0  # it stores little, and its counters show that
        groups, chunk = self.case.model.groups, self.case.chunk_tokens
        if self.case.leaves_no_hit(probe.tokens // chunk):
            return 0
        if self.case.settings.get("eviction_policy") == "arc" and probe.others:
            return 0  # ARC may evict all new chunks for others that were loaded again
        kept = min(probe.tokens // chunk * groups, slots - probe.others // chunk * groups)
        return max(0, (kept // groups // 2 - 1 - (groups > 1)) * chunk)

    # --- engines ---------------------------------------------------------------------------------

    def _engine(self, number: int) -> Engine:
        if number not in self._engines:
            self._engines[number] = self._start()
        return self._engines[number]

    def _start(self) -> Engine:
        case, stage = self.case, self._stage
        arguments = {**stage.more, **case.arguments}
        if case.ranks == 2:
            arguments |= TWO_RANKS
        if not self._connector:
            return stage.start(**arguments)
        slot = case.chunk_tokens * stage.bytes_per_token * case.ranks  # at most: ranks can share heads
        settings = patient(
            {
                "cpu_bytes_to_use": int(case.host_chunks * slot),
                "blocks_per_chunk": case.chunk_blocks,
                "secondary_tiers": [self._tier(tier) for tier in case.tiers],
                **case.settings,
            }
        )
        router = None
        if case.publishes:
            settings["self_describing_kv_events"] = True
            self._folder.mkdir(exist_ok=True)
            router = Router(f"ipc://{self._folder}/events-{len(self._routers)}")
            arguments |= router.arguments
        transfer = transfer_config(case.connector, settings)
        engine = stage.start(copy_s=case.copy_s, kv_transfer_config=transfer, **arguments)
        engine.has_kvtier = True
        if router is not None:
            self._routers[engine.pid] = router
            router.join(engine)
        return engine

    def _tier(self, tier: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**tier, "root_dir": str(self._folder / "root")} if tier["type"] == "fs" else tier


def transfer_config(connector: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config`` for a connector of a ``Case``."""
    extra = {"spec_name": "KVTierOffloadingSpec", **settings}
    is_beside = connector in BESIDE_A_TRANSPORT
    kind = (
        connector if not is_beside else "OffloadingConnector" if connector == "blind" else "KVTierConnector"
    )
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ours = {**common, "kv_connector": kind, "kv_connector_extra_config": extra}
    if not is_beside:
        return ours
    path = "tests.differential.transport"
    transport = {**common, "kv_connector": "Transport", "kv_connector_module_path": path}
    children = [ours, transport] if connector == "beside" else [transport, ours]
    return {**common, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}


def tokens_of(pieces: Iterable[Piece]) -> Tokens:
    """Return the tokens of pieces."""
    return [token for seed, tokens in pieces for token in make_prompt(seed, tokens)]


def _play(
    engine: Engine,
    orders: Sequence[Any],
    resets: Sequence[Any] = (),
    weights: int = 0,
    new: Sequence[int] = (),
) -> dict[str, Any]:
    return engine.call("play", module=DRIVER, orders=orders, resets=resets, weights=weights, new=new)
