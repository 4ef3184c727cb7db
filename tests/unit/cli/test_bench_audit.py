"""The measurement of audits, with few copies."""

from __future__ import annotations

from kvtier.cli.bench_audit import CHUNKS, Machine, run


def test_every_rate_is_measured_in_both_directions() -> None:
    machine, costs = run("cpu", jobs=1, rounds=1)
    assert isinstance(machine, Machine)
    assert machine.backend == "cpu"
    assert [(cost.way, cost.audit_rate) for cost in costs] == [
        (way, rate) for way in ("store", "load") for rate in (0.0, 0.001, 1.0)
    ]
    for cost in costs:
        assert cost.gb_s > 0
        assert cost.cpu_us > 0
        if cost.audit_rate == 0:
            assert (cost.audited, cost.times_cpu) == (0, 1.0)
        if cost.audit_rate == 1:
            assert cost.audited == 2 * CHUNKS  # the round that warms up among them
