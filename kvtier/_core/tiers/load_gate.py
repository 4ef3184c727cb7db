"""Load or compute: whether to fetch chunks that a tier may have, or to compute them because that is faster.

It compares costs without queues: a tier's latency and time per chunk, and the device's time per chunk. In a
burst both have queues, and a computed request makes those behind it wait for the device too. All values are
measured. Until both sides are known, everything is loaded.
"""

from __future__ import annotations

import sys
from math import inf
from typing import Literal

LoadGateMode = Literal["latency", "throughput", "off"]

_WEIGHT = 0.3  # weight of the last compute sample
_DRIFT = 0.1  # change of a tier's times from one get to the next, as a share of its time
_NOISE = 0.2  # ... and their variation
_FAR = 3.0  # as a multiple of the estimate: an outlier, or the first sign of a change
_HYSTERESIS = 1.05  # a closed tier must be faster by this factor to be used again
_FIRST_PROBE_S = 0.1  # after a tier was closed; doubled each time
_PROBE_EVERY_S = 5.0  # longest pause
_PROBE_AGAIN_S = 0.5  # after a probe for chunks that the tier lacked
_PROBE_S = 0.25  # longest estimated time of a probe ...
_PROBE_CHUNKS = 8  # ... and its most chunks
_ROUND_S = 0.1  # computing time per round, besides the first request in line
_NEXT_ROUND_S = 0.02
_LEAST_S = 1e-7  # lower bound of any time


class TierSpeed:
    """The time of a tier's gets: a latency, and a time for each chunk in flight, other gets' chunks included.

    A Kalman filter separates the two, from gets of different sizes. One get that takes much longer than
    expected changes nothing, nor do gets that ran at the same time. A second one that started after it, or
    one that is much faster, is believed at once.
    """

    def __init__(self) -> None:
        self.latency_s = self.chunk_s = 0.0  # the estimate; valid once ``is_known``
        self.is_closed = False  # computing was faster at the last decision
        self.is_probed = False  # a probe is in flight
        self.probe_from_s = -inf  # when the next probe may begin
        self.probe_wait_s = _FIRST_PROBE_S  # pause between that probe and the next
        self._doubted_s: float | None = None  # end of the last get, if that was an outlier
        # Variance of the latency, covariance, variance of the time per chunk.
        self._variance = (0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        return self.chunk_s > 0.0

    def note(self, chunks: int, seconds: float, now_s: float) -> None:
        """Update the estimate by a get that ended now. ``chunks``: in flight at its start, with its own."""
        seconds = max(seconds, _LEAST_S)
        if not self.is_known:
            self.latency_s, self.chunk_s = seconds / 2, seconds / 2 / chunks
            self._variance = (self.latency_s**2, 0.0, self.chunk_s**2)
        expected_s = self.latency_s + self.chunk_s * chunks
        is_late = seconds > expected_s * _FAR
        if is_late and (self._doubted_s is None or now_s - seconds < self._doubted_s):
            self._doubted_s = self._doubted_s or now_s
            return
        self._doubted_s = None
        if is_late:
            noise_s, drift_s, drift_chunk_s = _LEAST_S, seconds, seconds / chunks
        elif seconds < expected_s / _FAR:
            noise_s, drift_s, drift_chunk_s = _LEAST_S, self.latency_s, self.chunk_s
        else:
            noise_s, drift_s = _NOISE * expected_s, _DRIFT * expected_s
            drift_chunk_s = drift_s / chunks
        latency, both, chunk = self._variance
        latency, chunk = latency + drift_s**2, chunk + drift_chunk_s**2
        to_latency, to_chunk = latency + chunks * both, both + chunks * chunk
        total = to_latency + chunks * to_chunk + noise_s**2
        gain = (seconds - expected_s) / total
        corrected_s = expected_s + gain * (to_latency + chunks * to_chunk)
        self.chunk_s = max(_LEAST_S, min(self.chunk_s + gain * to_chunk, corrected_s / chunks))
        self.latency_s = max(_LEAST_S, corrected_s - self.chunk_s * chunks)
        self._variance = (
            max(0.0, latency - to_latency**2 / total),
            both - to_latency * to_chunk / total,
            max(0.0, chunk - to_chunk**2 / total),
        )


class ComputeSpeed:
    """Seconds that the device computes for a chunk, by the bit length of its place in the prompt.

    The last of ``rates`` applies to all later places. A place without samples has the rate of the nearest one
    before it, or after it. ``rates`` is empty before the first sample.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self._sampled: list[float] = []  # as ``rates``; 0 if there was no sample
        self._doubted: set[int] = set()  # indexes whose last sample was far off
        self._sums: list[float] = []  # seconds of all places of smaller bit length

    def note(self, place: int, chunks: float, seconds: float) -> None:
        """Update the estimate by a step that computed ``chunks`` around ``place``."""
        index, chunk_s = place.bit_length(), max(seconds, _LEAST_S) / chunks
        self._sampled += [0.0] * (index + 1 - len(self._sampled))
        usual_s = self._sampled[index] or chunk_s
        is_far = not usual_s / _FAR <= chunk_s <= usual_s * _FAR
        if is_far and index not in self._doubted:
            self._doubted.add(index)
            return
        self._doubted.discard(index)
        is_new = is_far or not self._sampled[index]
        self._sampled[index] = chunk_s if is_new else usual_s + _WEIGHT * (chunk_s - usual_s)
        self._fill()

    def _fill(self) -> None:
        rate = next(chunk_s for chunk_s in self._sampled if chunk_s)
        total_s, begin = 0.0, 0
        self.rates, self._sums = [], []
        for index, chunk_s in enumerate(self._sampled):
            rate = chunk_s or rate
            self.rates.append(rate)
            self._sums.append(total_s)
            total_s += rate * ((1 << index) - begin)
            begin = 1 << index

    def seconds(self, end: int) -> float:
        """Return the time to compute the chunks before place ``end``."""
        index = min(end.bit_length(), len(self.rates) - 1)
        return self._sums[index] + self.rates[index] * (end - (1 << index >> 1))


class LoadGate:
    """Decides with the current estimates. Times are on the owner's clock."""

    def __init__(self, mode: LoadGateMode, tiers: int) -> None:
        self.compute = ComputeSpeed()
        # Most chunks of windowed groups that a request loads, however many it asks for. Set by the owner.
        self.window_chunks = sys.maxsize
        self.running: set[object] = set()  # requests that the device computes now
        self.wait_until_s = inf  # when deferred requests are decided; infinite if there are none
        self._mode = mode
        self._round_s = 0.0  # computing that this round decided for
        self._tiers = [TierSpeed() for _ in range(tiers)]

    @property
    def is_on(self) -> bool:
        """Whether tiers and device are measured."""
        return self._mode != "off"

    @property
    def is_active(self) -> bool:
        """Whether it decides; otherwise everything is loaded."""
        return self.is_on and bool(self.compute.rates)

    def begin_round(self) -> None:
        self.wait_until_s = inf
        self._round_s = 0.0

    def defer(self, now_s: float) -> bool:
        """Defer a request that would be computed to the next round, if this one has enough; return whether.

        If many requests wait at once, the later ones lose nothing by that: the device is busy with the
        earlier ones, and the tier may be fast again before their turn.
        """
        if self._round_s < _ROUND_S:
            return False
        self.wait_until_s = now_s + _NEXT_ROUND_S
        return True

    def decide_to_compute(
        self, tier: int, fetched: int, gets: int, place: int, count: int, now_s: float
    ) -> bool:
        """Decide whether to compute ``count`` chunks, the first at ``place``, because the tier takes longer.

        ``fetched`` is the number of chunks to get instead, in ``gets`` gets one after the other.
        """
        speed = self._tiers[tier]
        if not (self.is_active and speed.is_known) or (self._mode == "throughput" and self.running):
            return False
        fetch_s = speed.latency_s * gets + speed.chunk_s * fetched
        computed_s = self.compute.seconds(place + count) - self.compute.seconds(place)
        was_closed = speed.is_closed
        speed.is_closed = fetch_s * (_HYSTERESIS if was_closed else 1.0) > computed_s
        if speed.is_closed and not was_closed and now_s >= speed.probe_from_s + _PROBE_EVERY_S:
            speed.probe_from_s, speed.probe_wait_s = now_s + _FIRST_PROBE_S, 2 * _FIRST_PROBE_S
        return speed.is_closed

    def count_computed(self, place: int, count: int) -> None:
        """Count computed chunks against the limit of a round."""
        self._round_s += self.compute.seconds(place + count) - self.compute.seconds(place)

    def probe_size(self, tier: int, now_s: float) -> int:
        """Return the size of a probe that starts now; 0 if none is due or one is in flight."""
        speed = self._tiers[tier]
        if now_s < speed.probe_from_s or speed.is_probed:
            return 0
        return max(1, min(_PROBE_CHUNKS, int((_PROBE_S - speed.latency_s) / speed.chunk_s)))

    def note_probe(self, tier: int, now_s: float) -> None:
        speed = self._tiers[tier]
        speed.is_probed = True
        speed.probe_from_s = now_s + speed.probe_wait_s
        speed.probe_wait_s = min(2 * speed.probe_wait_s, _PROBE_EVERY_S)

    def note_probe_ended(self, tier: int, now_s: float, *, found_any: bool) -> None:
        """Note that a probe has ended; the next one comes soon if the tier lacked its chunks."""
        self._tiers[tier].is_probed = False
        if not found_any:
            self._tiers[tier].probe_from_s = now_s + _PROBE_AGAIN_S

    def get_ended(
        self, tier: int, chunks: int, seconds: float, now_s: float, *, at_least: bool = False
    ) -> None:
        """Update a tier's speed by a get: see ``TierSpeed.note``.

        ``at_least``: the get copied nothing, so it counts only if it took longer than copying.
        """
        speed = self._tiers[tier]
        if not at_least or (speed.is_known and seconds > speed.latency_s + speed.chunk_s * chunks):
            speed.note(chunks, seconds, now_s)
