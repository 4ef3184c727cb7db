"""Load or compute: whether chunks that a tier may have are fetched, or computed because that is quicker.

What is compared is what each costs by itself: a tier its latency and a time per chunk, the device a time
per chunk. Queues are left out on purpose. In a burst both have one, and a request that is computed makes
those behind it wait for the device as well as itself.

All of it is measured. Until both sides are known, everything is loaded.
"""

from __future__ import annotations

import sys
from math import inf
from typing import Literal

LoadGateMode = Literal["latency", "throughput", "off"]

_WEIGHT = 0.3  # of the last sample of computing
_DRIFT = 0.1  # how much the times of a tier change from one get to the next, as a share of what it takes
_NOISE = 0.2  # ... and how much they vary
_FAR = 3.0  # times the estimate: an outlier, or the first sign of a change
_HYSTERESIS = 1.05  # by how much a tier has to be quicker before it is used again
_FIRST_PROBE_S = 0.1  # after a tier was closed; then twice as long each time
_PROBE_EVERY_S = 5.0  # at most
_PROBE_AGAIN_S = 0.5  # after a probe for chunks that the tier did not have
_PROBE_S = 0.25  # what a probe may take, by the estimate ...
_PROBE_CHUNKS = 8  # ... and its most chunks
_ROUND_S = 0.1  # of computing that a round may decide for, besides the first in line
_NEXT_ROUND_S = 0.02
_LEAST_S = 1e-7  # seconds that anything takes


class TierSpeed:
    """What a get of a tier takes: a latency, and a time for each chunk in flight, its own and others'.

    A Kalman filter tells the two apart from gets of different sizes. One get that takes much longer than
    expected changes nothing, nor do those that ran at the same time; a second one that began after it, or one
    that is much quicker, is believed at once.
    """

    def __init__(self) -> None:
        self.latency_s = self.chunk_s = 0.0  # the estimate; of use once ``is_known``
        self.is_closed = False  # computing was quicker when it was last asked
        self.is_probed = False  # a probe is under way
        self.probe_from_s = -inf  # when the next probe may begin
        self.probe_wait_s = _FIRST_PROBE_S  # how long after it the one that follows may
        self._doubted_s: float | None = None  # when the last get ended, if it was much too long
        self._variance = (0.0, 0.0, 0.0)  # of the latency, of both together, of the time per chunk

    @property
    def is_known(self) -> bool:
        """Whether there was a sample."""
        return self.chunk_s > 0.0

    def note(self, chunks: int, seconds: float, now_s: float) -> None:
        """Update the estimate by a get that ended now; ``chunks``: in flight when it began, its own too."""
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

    The last of ``rates`` is for all places that follow. Where there was no sample, a rate is that of the
    nearest place before, or after. There are none while nothing is known.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self._sampled: list[float] = []  # as ``rates``; 0 where there was no sample
        self._doubted: set[int] = set()  # indexes whose last sample was far off
        self._sums: list[float] = []  # seconds of all places of lesser bit length

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
        """Return the time of the chunks before place ``end``."""
        index = min(end.bit_length(), len(self.rates) - 1)
        return self._sums[index] + self.rates[index] * (end - (1 << index >> 1))


class LoadGate:
    """Decides with the current estimates. Times are on the owner's clock.

    Attributes:
        window_chunks: at most so many chunks of windowed groups does a request load, however many it asks
            for. Set by the owner.
    """

    def __init__(self, mode: LoadGateMode, tiers: int) -> None:
        self.compute = ComputeSpeed()
        self.window_chunks = sys.maxsize
        self.running: set[object] = set()  # requests that the device computes now
        self.wait_until_s = inf  # when those that were told to wait are decided; infinite if there are none
        self._mode = mode
        self._round_s = 0.0  # of computing, decided in this round
        self._tiers = [TierSpeed() for _ in range(tiers)]

    @property
    def is_on(self) -> bool:
        """Whether tiers and device are measured."""
        return self._mode != "off"

    @property
    def is_active(self) -> bool:
        """Whether gets are decided here at all; else everything is loaded."""
        return self.is_on and bool(self.compute.rates)

    def begin_round(self) -> None:
        """Begin a round of decisions."""
        self.wait_until_s = inf
        self._round_s = 0.0

    def has_to_wait(self, now_s: float) -> bool:
        """Return whether a request that would be computed is decided in the next round instead.

        Where many requests wait at once, the later ones lose nothing by that: the device is busy with the
        earlier ones, and the tier may be quick again before their turn comes.
        """
        if self._round_s < _ROUND_S:
            return False
        self.wait_until_s = now_s + _NEXT_ROUND_S
        return True

    def is_slower(self, tier: int, fetched: int, gets: int, place: int, count: int, now_s: float) -> bool:
        """Return whether a tier takes longer than computing ``count`` chunks, the first at ``place``.

        ``fetched`` is how many chunks have to be got instead, and ``gets`` how many gets that takes, one
        after the other.
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

    def computes(self, place: int, count: int) -> None:
        """Count chunks that are computed instead of loaded against what a round may decide."""
        self._round_s += self.compute.seconds(place + count) - self.compute.seconds(place)

    def probe_size(self, tier: int, now_s: float) -> int:
        """Return how many chunks a probe gets that begins now; 0 where none is due, or one is under way."""
        speed = self._tiers[tier]
        if now_s < speed.probe_from_s or speed.is_probed:
            return 0
        return max(1, min(_PROBE_CHUNKS, int((_PROBE_S - speed.latency_s) / speed.chunk_s)))

    def probe_begins(self, tier: int, now_s: float) -> None:
        """Note that a probe begins."""
        speed = self._tiers[tier]
        speed.is_probed = True
        speed.probe_from_s = now_s + speed.probe_wait_s
        speed.probe_wait_s = min(2 * speed.probe_wait_s, _PROBE_EVERY_S)

    def probe_ended(self, tier: int, now_s: float, *, found_any: bool) -> None:
        """Note that a probe has ended; the next one begins soon if the tier did not have its chunks."""
        self._tiers[tier].is_probed = False
        if not found_any:
            self._tiers[tier].probe_from_s = now_s + _PROBE_AGAIN_S

    def get_ended(
        self, tier: int, chunks: int, seconds: float, now_s: float, *, at_least: bool = False
    ) -> None:
        """Update a tier's speed by a get: see ``TierSpeed.note``.

        ``at_least``: it copied nothing, so that it counts only if it took longer than copying.
        """
        speed = self._tiers[tier]
        if not at_least or (speed.is_known and seconds > speed.latency_s + speed.chunk_s * chunks):
            speed.note(chunks, seconds, now_s)
