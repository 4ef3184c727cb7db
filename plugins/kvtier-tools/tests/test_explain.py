"""``kvtier explain``, of logs without an explanation; tests/unit/telemetry has the others."""

from __future__ import annotations

from pathlib import Path

from tests.caches import Kvtier


def test_log_without_explanations_has_a_remedy(kvtier: Kvtier, tmp_path: Path) -> None:
    (log := tmp_path / "engine.log").write_text("INFO the engine is ready\n")
    said = kvtier("explain", str(log))
    assert said.status == 0
    assert "explain_rate" in said.out
