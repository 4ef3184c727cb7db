"""What a forked child does for the tests beside what the engines of benchmarks do: orders over a socket."""

from __future__ import annotations

import importlib

from kvtier_bench import engine_process
from kvtier_bench.engine_process import Answer, Order, sampling
from tests.integration.faults import Faults


class EngineChild(engine_process.Engine):
    """One engine and what can be asked of it."""

    _faults: Faults | None = None

    def make_copies_faulty(self, order: Order) -> Answer:
        """Have the copies of the engine that is started next ask whether to fail."""
        self._faults = Faults(order["file"])
        self._faults.install()
        return {}

    def fail_copies(self, order: Order) -> Answer:
        """Set how many copies fail from now on."""
        assert self._faults is not None
        self._faults.set(**{name: order[name] for name in ("stores", "loads", "staged", "rank")})
        return {}

    def abort(self, order: Order) -> Answer:
        """Send prompts, do some steps, abort all that has not ended; say how many those were."""
        engine = self._llm.llm_engine
        names = [f"{order['name']}-{number}" for number in range(len(order["prompts"]))]
        for name, prompt in zip(names, order["prompts"], strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling(order["output_tokens"]))
        ended = set()
        for _ in range(order["steps"]):
            ended |= {output.request_id for output in engine.step() if output.finished}
        engine.abort_request([name for name in names if name not in ended])
        return {"aborted": len(names) - len(ended)}

    def defined(self, order: Order) -> Answer:
        """Return the names of all metrics that kvtier can send."""
        from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES

        return {"names": [metric.name for metric in (*COUNTERS.values(), *BYTES.values(), *GAUGES.values())]}

    def reset(self, order: Order) -> Answer:
        """Forget what is cached on the device, and with ``connector`` everywhere else."""
        done = self._llm.reset_prefix_cache(reset_connector=order["connector"])
        return {"done": bool(done)}

    def call(self, order: Order) -> Answer:
        """Call a function of the tests with the engine: ``module`` and ``function`` name it."""
        function = getattr(importlib.import_module(order["module"]), order["function"])
        answer: Answer = function(self._llm, **order["arguments"])
        return answer

    def sleep(self, order: Order) -> Answer:
        """Go to sleep and wake up again; with ``weights``, the model's weights are others afterwards."""
        self._llm.sleep(level=order["level"])
        if order["weights"] is not None:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": order["weights"]})
        self._llm.wake_up()
        return {}

    def reload(self, order: Order) -> Answer:
        """Give the model other weights, as a trainer does: in place and without a word to the scheduler."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": order["weights"]})
        return {}
