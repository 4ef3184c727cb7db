"""The measurement of device copies runs through on the CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kvtier_bench import device


def test_every_copy_is_measured_beside_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PLANNED_PAGES", (256,))
    monkeypatch.setattr(device, "PAGE_BYTES", (2**16, 2**21))
    monkeypatch.setattr(device, "ROUNDS", 1)
    figures = device.run("cpu", mib=16)
    speeds = [it for it in figures if isinstance(it, device.CopySpeed)]
    assert {it.way for it in speeds} == {"store", "load", "both"}
    assert all(it.gb_s > 0 and it.limit_gb_s > 0 and it.loop_gb_s > 0 for it in speeds)
    assert [it.pages for it in figures if isinstance(it, device.PlanCost)] == [256, 256]
