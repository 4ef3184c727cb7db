"""What is made of the samples of real engines."""

from __future__ import annotations

import pytest

from kvtier_bench.engine.compared import PLAIN
from kvtier_bench.engine.versus import speed
from kvtier_bench.engine.versus.systems import KVTIER, LMCACHE


def test_a_measure_is_compared_within_a_round_with_kvtier_or_with_no_cache() -> None:
    found = {
        speed.HOST: {LMCACHE: [20.0, 400.0, 60.0], KVTIER: [10.0, 100.0, 20.0]},
        speed.UNSEEN: {KVTIER: [1.1, 2.2, 3.3], PLAIN: [1.0, 2.0, 3.0]},
        speed.WRITTEN: {KVTIER: [1.5], LMCACHE: [3.0]},
    }
    rows = {
        (row.measure, row.system): row for row in speed.table(found, {(speed.HOST, LMCACHE): [1279, 1280]})
    }
    host = rows[speed.HOST, LMCACHE]
    assert (host.value, host.ratio, host.low, host.high, host.against) == (60.0, 3.0, 2.0, 4.0, KVTIER)
    assert host.from_cache == "1279 of 1280"
    assert rows[speed.HOST, KVTIER].ratio is None
    assert rows[speed.UNSEEN, KVTIER].ratio == pytest.approx(1.1)
    assert rows[speed.UNSEEN, KVTIER].against == PLAIN
    assert rows[speed.WRITTEN, LMCACHE] == speed.Speed(speed.WRITTEN, LMCACHE, 3.0, 2.0, against=KVTIER, n=1)
