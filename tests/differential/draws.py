"""Draws lives from seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.differential.lives import BESIDE_A_TRANSPORT, Ask, Case, Life, Piece, Probe, Round
from tests.differential.models import DRAFTS, KINDS, Model
from tests.differential.plan import Plan

LIVES_OF_A_CASE, LIVES_OF_A_MODEL = 4, 24
"""Number of consecutive seeds that share an engine or a model, which take longer to make than a life to
run."""

_MOST_REQUESTS = 1000  # of a life
_MOST_DRAWS = 20
_KEPT_S = 60.0  # longer than an engine takes to restart


def draw(seed: int) -> Life:
    """Draw a life that should load chunks. Equal seeds draw equal lives."""
    model = draw_model(Random(f"model {seed // LIVES_OF_A_MODEL}"))
    case = draw_case(Random(f"case {seed // LIVES_OF_A_CASE}"), model)
    if Random(f"keeping {seed // LIVES_OF_A_CASE}").random() < 0.3:
        case = replace(case, settings={**case.settings, "keep_host_memory_s": _KEPT_S})
    chance = Random(f"life {seed}")
    lives = [draw_life(chance, case, seed % LIVES_OF_A_CASE)]
    while len(lives) < _MOST_DRAWS and not Plan(lives[-1]).is_fit:
        lives.append(draw_life(chance, case, seed % LIVES_OF_A_CASE))
    life = lives[-1]
    # Generators of their own, so that the lives are the same as without them.
    weights, actions = Random(f"new weights {seed}"), Random(f"actions {seed}")
    life = with_new_weights(life, weights) if weights.random() < 0.3 else life
    return with_actions(life, actions) if actions.random() < 0.5 else life


def with_new_weights(life: Life, chance: Random) -> Life:
    """Return a life in which some resets do not reach kvtier: it only sees the call for new weights."""
    # With vLLM's connector, 0.32 fails if it loads a request in the step that preempts it.
    quiet = {"all": "weights"} | ({"preempt": "preempt weights"} if "KV" in life.case.connector else {})
    rounds = [
        replace(
            one,
            resets=tuple(
                (step, quiet.get(what, what) if chance.random() < 0.7 else what) for step, what in one.resets
            ),
        )
        for one in life.rounds
    ]
    return replace(life, rounds=tuple(rounds))


def with_actions(life: Life, chance: Random) -> Life:
    """Return a life in which many clients send actions instead of kvtier parameters."""
    rounds = [
        replace(one, asks=tuple(replace(ask, hint=actions_for(ask.hint, chance)) for ask in one.asks))
        for one in life.rounds
    ]
    return replace(life, rounds=tuple(rounds))


def actions_for(hint: Mapping[str, Any], chance: Random) -> Mapping[str, Any]:
    """Draw a client's parameters: actions, or the given ones without kvtier's."""
    others = {key: value for key, value in hint.items() if key != "kvtier"}
    if chance.random() < (0.8 if hint else 0.4):
        sent = [draw_action(chance) for _ in range(chance.choice([1, 1, 2, 4]))]
        envelope = {"protocol_version": "0.1", "message_id": "life", "actions": sent}
        return {**others, **chance.choice([{"kv_hint": envelope}, {"kvtier": {"hints": envelope}}])}
    return hint


def draw_action(chance: Random) -> Mapping[str, Any]:
    """Draw an action. Its ``block_hashes`` are places among the chunks in host memory, from 0 to 1."""
    kind = chance.choice(["fetch", "prefetch", "demote", "pin", "retain", "release"])
    payload: dict[str, Any] = {"ttl_s": chance.choice([0.05, 1, 60])}
    target = chance.choice(["prompt", "session", "blocks", "blocks"])
    if target == "session":
        payload["session"] = chance.choice(["one", "two"])
    elif target == "blocks":
        payload["block_hashes"] = [chance.randrange(100) / 100 for _ in range(chance.choice([1, 4, 20, 100]))]
    if kind == "retain":
        payload["priority"] = chance.randrange(4)
    elif kind == "fetch":
        payload["wait_s"] = 0.1
    elif kind == "prefetch" and chance.random() < 0.4:
        payload["next_use_s"] = chance.choice([0.1, 1])
    version = "1.0" if kind == "fetch" else "0.1"
    return {"action_id": kind, "action_type": f"kv.{kind}", "action_version": version, "payload": payload}


def draw_model(chance: Random) -> Model:
    """Draw a model of a kind that the CPU runs."""
    kind = chance.choice([*sorted(KINDS), "llama", "llama"])
    windows = KINDS[kind].windows
    draft = chance.choice(DRAFTS) if KINDS[kind].drafts and chance.random() < 0.3 else ""
    return Model(
        kind,
        window=chance.choice([32, 48, 64, 96, 160, 250, 320]) if windows else 0,
        # With one tensor, the pages of adjacent slots are contiguous.
        layers=chance.choice(["ssf" * 2, "sf", "sf" * 2, "sssf", "sff" * 2] if windows else ["", "f"]),
        draft=draft,
        # The engine failed with adapters and EAGLE; untested without a connector.
        adapters=2 if KINDS[kind].adapters and not draft and chance.random() < 0.25 else 0,
    )


def draw_case(chance: Random, model: Model) -> Case:
    """Draw an engine that runs a model, and its connector."""
    block, longest = chance.choice([32, 32, 64]), chance.choice([512, 1024])
    overflows = chance.random() < 0.3  # a prompt of many chunks overflows host memory over several steps
    # A prompt of fewer than four chunks tests little.
    chunks_of = [one for one in (1, 2, 2, 3, 4, None) if 4 * block * (one or 256 // block) <= longest]
    chunk = chance.choice([1] if overflows else chunks_of)
    groups = model.groups
    whole = groups * -(-longest // block)  # blocks of the longest possible prompt
    chunks, tiers = max(1, whole // (chunk or 4)), tuple(draw_tiers(chance))
    # Tiers are read only if the primary tier is too small.
    host = chance.choice([0.25, 0.5, 1, 1, 1.5, 3] if tiers else [0.25, 0.5, 1, 1.5, 3, 8])
    host = 0.5 if overflows else host
    connectors = ["OffloadingConnector", "KVTierConnector"]
    if groups == 1 and not model.draft:
        connectors += BESIDE_A_TRANSPORT
    connector = chance.choice(connectors)
    # A transport receives into blocks of the previous request, whose copies are still running.
    has_transport = connector in BESIDE_A_TRANSPORT
    arguments = {
        "block_size": block,
        "max_model_len": longest,
        "max_num_batched_tokens": chance.choice([64, 128, 256] if overflows else [64, 128, 256, 2048]),
        "max_num_seqs": chance.choice([2, 8, 16]),
        "num_gpu_blocks_override": int(whole * chance.choice([1] if has_transport else [1, 1.3, 2, 4])) + 4,
        "async_scheduling": chance.random() < 0.5 and model.draft != "ngram",
        "enable_prefix_caching": chance.random() < 0.85,
        "scheduling_policy": chance.choice(["fcfs", "fcfs", "priority"]),
    }
    settings: dict[str, Any] = {
        "isolation": chance.choice(["thread", "thread", "process"]),
        "eviction_policy": chance.choice(["auto", "auto", "lru", "arc", "lhd"]),
        "offload_prompt_only": chance.random() < 0.5,
        "audit_rate": chance.choice([0, 0, 1.0]),
    }
    if chance.random() < 0.25:
        settings["store_threshold"] = chance.choice([2, 3])
    case = Case(
        model,
        chunk,
        host_chunks=max(4 * groups, int(chunks * host)),
        connector=connector,
        arguments=arguments,
        settings=settings,
        tiers=tiers,
        copy_s=chance.choice([0.02, 0.05] if has_transport else [0, 0, 0.01, 0.1]),
        publishes=chance.random() < 0.4,
    )
    if case.lacks_parts and chance.random() < 0.8:
        # Such a case stores little: it only proves that nothing is stored in part.
        case = replace(case, arguments={**arguments, "max_num_batched_tokens": 2048})
    # The tests' transport works within one process. Two ranks with adapters, or with gpt_oss and its one KV
    # head, fail without a connector, too.
    can_split = not model.draft and not model.adapters and model.kind != "gpt_oss"
    if not has_transport and can_split and chance.random() < 0.15:
        # kvtier refuses local chunks in the canonical layout.
        is_canonical = chance.random() < 0.5 and model.kind != "llama4"
        return replace(case, ranks=2, settings={**settings, "canonical_layout": is_canonical})
    return case


def draw_tiers(chance: Random) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of up to two secondary tiers."""
    policy = {"write_policy": chance.choice(["all", "all", "all", "reused", "adaptive"])}
    kinds = chance.choice([[], ["fs"], ["dummy"], ["dummy", "fs"]])
    if "dummy" in kinds:
        yield {
            "type": "dummy",
            "get_latency_s": chance.choice([0, 0.002, 0.02]),
            "put_latency_s": chance.choice([0, 0.002, 0.3]),
            "failure_rate": chance.choice([0, 0.05, 0.2]),
            "corruption_rate": chance.choice([0, 0.05, 0.2]),
            "hang_rate": chance.choice([0, 0, 0, 0.02]),
            "deadline_s": 1.0,
            "complete_index": chance.random() < 0.5,
            "seed": chance.randrange(100),
            **policy,
        }
    if "fs" in kinds:
        yield {"type": "fs", **policy}


def features(case: Case) -> Mapping[str, Any]:
    """Return whether an engine has each feature, by its name."""
    model, given, tiers = case.model, {**case.arguments, **case.settings}, [one["type"] for one in case.tiers]
    connectors = ("OffloadingConnector", "KVTierConnector", *BESIDE_A_TRANSPORT)
    return {
        **{kind: model.kind == kind for kind in KINDS},
        **{f"draft {draft}": model.draft == draft for draft in DRAFTS},
        **{connector: case.connector == connector for connector in connectors},
        **{f"tier {tier}": tier in tiers for tier in ("fs", "dummy")},
        "windows": model.window,
        "one tensor": model.layers in ("f", "sf"),
        "LoRA": model.adapters,
        "chunks of several blocks": case.chunk_blocks != 1,
        "slow copies": case.copy_s,
        "KV events": case.publishes,
        "async scheduling": given.get("async_scheduling"),
        "no prefix caching": not given.get("enable_prefix_caching", True),
        "prompts in several steps": case.longest > given.get("max_num_batched_tokens", 2048),
        "store_threshold": given.get("store_threshold"),
        "kept memory": given.get("keep_host_memory_s"),
        "two ranks": case.ranks == 2,
        # Not drawn: on the CPU their answers depend on how vLLM splits a prompt into steps.
        **dict.fromkeys(("MLA", "states (Mamba)"), False),
    }


HINTS: Sequence[Mapping[str, Any]] = (
    {"max_offload_tokens": 100},
    {"max_load_tokens": 64},
    {"kv_load_tiers": []},
    {"kvtier": {"priority": 1}},
    {"kvtier": {"pin": "one", "ttl_s": 5}},
    {"kvtier": {"release": "one"}},
    {"kvtier": {"release": True}},
    {"kvtier": {"next_use_s": 1}},
    {"kvtier": {"wait_s": 0.1, "explain": True}},
)


class Drawer:
    """Draws requests whose prompts form a tree.

    Each life draws its own odds for each feature. A life without a feature shows defects that the feature
    hides; a life with many shows defects that need several.

    Args:
        chance: the source of all draws.
        case: the engine.
        name: the number before the first request's.
    """

    def __init__(self, chance: Random, case: Case, name: int = 0) -> None:
        self._chance, self._case, self._name = chance, case, name
        self._sizes: dict[int, int] = {}  # the maximum length of each request's text
        self._whose: dict[int, tuple[str, int]] = {}  # their salts and adapters
        self._begun: dict[int, int] = {}  # the request that each one continues
        self._sessions: list[int] = []  # in this round
        self._odds: dict[str, float] = {}
        # With or without a connector, vLLM hangs if two paused sessions hold blocks that both wait for.
        blocks = int(case.arguments["num_gpu_blocks_override"])
        self._is_tight = blocks < 2 * case.model.groups * case.longest // case.block_tokens
        self._has_session = False  # in this round
        self._has_transport = case.connector in BESIDE_A_TRANSPORT
        block = case.block_tokens
        units = {block, block * (case.chunk_blocks or 4), case.model.window or block}
        self._units = sorted({*units, int(case.arguments.get("max_num_batched_tokens", block))})

    def length(self, most: int) -> int:
        """Draw a length near a boundary of a block, chunk, window or batch, often the last boundary."""
        unit = self._chance.choice([one for one in self._units if one <= most] or [most])
        length = unit * self._chance.choice([self._chance.randrange(1, most // unit + 1), most // unit])
        length += self._chance.choice([-1, 0, 0, 1, self._chance.randrange(unit)])
        return max(1, min(most, length))

    def pieces(self, most: int) -> tuple[Piece, ...]:
        """Draw new tokens; none if there is no room."""
        return ((self._chance.getrandbits(30), self.length(most)),) if most > 0 else ()

    def happens(self, feature: str) -> bool:
        if feature not in self._odds:
            self._odds[feature] = self._chance.choice([0.0, 0.1, 0.4])
        return self._chance.random() < self._odds[feature]

    def ask(self) -> Ask:
        """Draw a request: a new prompt, or one that continues an earlier text or its beginning."""
        chance, room, name = self._chance, self._case.longest - 64, self._name + len(self._sizes) + 1
        say, after, keep, old = chance.choice([1, 4, 4, 12, 40]), None, None, 0
        if self._sizes and chance.random() < 0.65:
            after = self._begun[name] = self.of_late()
            old = self._sizes[after]
            if old > room or chance.random() < 0.6:
                keep = old = self.length(min(old, room))
        is_session = self.happens("session") and not self._has_session
        self._has_session |= is_session and self._is_tight
        pieces = self.pieces((room - old) // 2 if is_session else room - old)
        if old and self.happens("continue"):
            pieces = ()
        size = old + sum(tokens for _, tokens in pieces) + say
        more = tuple(self.more(room - size)) if is_session else ()
        self._sizes[name] = size + sum(piece[1] + said for (piece,), said in more)
        self._sessions += [name] * bool(more)
        salt, adapter = self._whose[name] = self.whose(after)
        return Ask(
            name,
            pieces,
            after,
            keep,
            say=say,
            at=chance.choice([0, 0, chance.randrange(20)]),
            abort=chance.randrange(1, 12) if self.happens("abort") else None,
            more=more,
            eager=bool(more) and chance.random() < 0.3,
            salt=salt,
            adapter=adapter,
            priority=chance.randrange(3) if "priority" in self._case.arguments.values() else 0,
            # vLLM's CPU engine crashes when it adapts the logits of a prompt (0.32).
            prompt_logprobs=not more and self.happens("logprobs") and not self._case.model.adapters,
            hint=self.hint(),
        )

    def whose(self, after: int | None) -> tuple[str, int]:
        """Draw salt and adapter; a continuation mostly keeps those of its predecessor."""
        if after is not None and not self.happens("other salt"):
            return self._whose[after]
        salt = self._chance.choice(["", "first", "second"]) if self.happens("other salt") else ""
        return salt, self._chance.randrange(self._case.model.adapters + 1)

    def more(self, room: int) -> Iterator[tuple[tuple[Piece, ...], int]]:
        """Draw further inputs of a session."""
        for _ in range(self._chance.randrange(1, 4)):
            say = self._chance.choice([1, 4, 12, 30])
            if room - say < 2:
                return
            pieces = self.pieces((room - say) // 2)
            room -= pieces[0][1] + say
            yield pieces, say

    def hint(self) -> Mapping[str, Any]:
        """Draw the client's parameters, and whether a transport provides the prompt."""
        if self.happens("hint"):
            return self._chance.choice(HINTS)
        return {"transport": "receive"} if self._has_transport and self._chance.random() < 0.5 else {}

    def round(self) -> Round:
        """Draw concurrent requests, an action before them, and resets."""
        chance, self._has_session = self._chance, False
        asks = tuple(self.ask() for _ in range(chance.choice([1, 1, 2, 3, 5])))
        before = ["", "", "", "settle", "forget", "forget", "reset"]
        before += ["restart", "kill"] * self.happens("restart")
        if "keep_host_memory_s" in self._case.settings:  # a reset clears the kept memory
            before = ["", "", "settle", "forget", "restart", "kill", "kill"]
        # vLLM refuses to reset while a transport provides a prompt.
        step, what = chance.randrange(12), chance.choice(["device", "all", "preempt"])
        # No further draw: the lives of a seed stay as they are. vLLM 0.32 fails on it with its own connector.
        if what == "device" and step % 2 and self._case.connector == "KVTierConnector":
            what = "preempt device"
        resets = ((step, what),)
        return Round(
            asks,
            before=chance.choice(before),
            resets=resets if self.happens("reset") and not self._has_transport else (),
            engine=int(self._case.tiers != () and self.happens("other engine")),
        )

    def look(self, after: int) -> Iterator[Round]:
        """Draw a request for a text or its beginning, after a reset of the device's cache.

        The text can be the predecessor of the given one, whose chunks were stored from its own or from shared
        blocks. A request for the whole text can follow. If the beginning ended inside a chunk, the load
        begins there.
        """
        chance = self._chance
        if after not in self._sessions:
            after = chance.choice([after, self._begun.get(after, after)])
        room, size = self._case.longest - 64, self._sizes[after]
        keep = None if size < room and chance.random() < 0.3 else self.length(min(size, room))
        salt, adapter = self._whose[after]
        ask = Ask(0, self.pieces(1), after, keep, salt=salt, adapter=adapter)
        yield Round((ask,), before="forget")
        if keep is not None and chance.random() < 0.6:
            yield Round((replace(ask, keep=min(size, room)),))

    def rounds(self) -> Iterator[Round]:
        """Yield rounds. A look at a recent text follows many of them; looks at up to six texts come last.

        A session's text is preferred: its last chunks were stored from several inputs.
        """
        for _ in range(self._chance.randrange(4, 16)):
            self._sessions.clear()
            yield self.round()
            if self._chance.random() < 0.8:
                yield from self.look(self._chance.choice(self._sessions or [self.of_late()]))
        for after in self._chance.sample(list(self._sizes), min(len(self._sizes), 6)):
            yield from self.look(after)

    def of_late(self) -> int:
        """Draw an earlier request, mostly a recent one."""
        known = list(self._sizes)
        return self._chance.choice(known[-4:] if self._chance.random() < 0.7 else known)


def draw_life(chance: Random, case: Case, number: int = 0) -> Life:
    """Draw requests. If ``number`` earlier lives have used the engine, the first round resets it."""
    drawer = Drawer(chance, case, _MOST_REQUESTS * number)
    first, *later = drawer.rounds()
    rounds = (replace(first, before="reset") if number else first, *later)
    tokens, others = (chance.randrange(case.longest // 3, case.longest - 64) for _ in range(2))
    if tokens >= case.host_chunks // case.model.groups * case.chunk_tokens:
        others = 0  # the prompt alone fills host memory
    probe = Probe(tokens, chance.choice([0, others]), case.settings.get("store_threshold", 1))
    return Life(case, rounds, probe if chance.random() < 0.7 else None)
