"""The benchmark of device copies, with few and small ones; its verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.cli import bench_device
from kvtier.cli.bench_device import ComputeLoss, CopySpeed, Goal, Machine, PlanCost
from kvtier.errors import ConfigError


def of(kind: type, figures: list[Any]) -> list[Any]:
    return [figure for figure in figures if isinstance(figure, kind)]


def test_describing_copies_is_quicker_than_a_loop_over_pages() -> None:
    # A loop over pages in the planner would be slower than the plainest one, which it is compared with.
    cost = bench_device._plan_cost(8192, scattered=True)
    assert cost.copies == 8192
    assert cost.times_faster > 1.5


def test_without_a_device_the_host_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "PLANNED_PAGES", (64, 256))
    figures = bench_device.run("cuda", host_only=True)
    costs = of(PlanCost, figures)
    assert [(cost.pages, cost.blocks) for cost in costs] == [
        (64, "scattered"),
        (256, "scattered"),
        (64, "neighbours"),
        (256, "neighbours"),
    ]
    assert len(of(Goal, figures)) == 1


def test_copies_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "PLANNED_PAGES", (256,))
    monkeypatch.setattr(bench_device, "PAGE_BYTES", (2**16, 2**21))
    monkeypatch.setattr(bench_device, "ROUNDS", 1)
    figures = bench_device.run("cpu", mib=16)
    (machine,) = of(Machine, figures)
    assert (machine.backend, machine.mib, machine.pinned) == ("cpu", 16, 0.0)
    assert [(it.page_kib, it.pages, it.way) for it in of(CopySpeed, figures)] == [
        (page_kib, pages, way)
        for page_kib, counts in ((64, (1, 16, 256)), (2048, (1,)))
        for pages in counts
        for way in ("store", "load", "both")
    ]
    assert all(it.gb_s > 0 and it.limit_gb_s > 0 and it.loop_gb_s > 0 for it in of(CopySpeed, figures))
    assert [it.page_kib for it in of(ComputeLoss, figures)] == [64, 2048]
    assert len(of(PlanCost, figures)) == 2
    assert [goal.verdict for goal in of(Goal, figures)[1:]] == ["no accelerator here"] * 3


def test_a_backend_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="possible here: cpu"):
        bench_device.run("abacus")


def speed(page_kib: int, pages: int, way: str, percent: float) -> CopySpeed:
    return CopySpeed(page_kib, pages, way, 1.0, 1.0, percent, 1.0, 1.0)


@pytest.mark.parametrize(
    ("store", "load", "lost", "verdicts"),
    [
        (97.0, 99.0, 2.9, ["pass", "pass", "pass"]),
        (96.9, 99.0, 3.0, ["fail", "pass", "fail"]),
        (99.0, 89.9, 0.0, ["fail", "fail", "pass"]),
    ],
)
def test_goals_are_held_against_the_worse_way_of_the_largest_submission(
    store: float, load: float, lost: float, verdicts: list[str]
) -> None:
    speeds = [
        speed(page_kib, pages, way, percent if pages == 256 else 1.0)
        for page_kib in (64, 2048)
        for pages in (1, 256)
        for way, percent in (("store", store), ("load", load), ("both", 1.0))
    ]
    losses = [ComputeLoss(16, 50.0), ComputeLoss(64, lost), ComputeLoss(2048, 0.0)]
    assert [goal.verdict for goal in bench_device._goals(speeds, losses, None)] == verdicts
