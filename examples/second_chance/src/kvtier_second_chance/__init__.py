"""An eviction policy: a chunk read since it was last considered gets a second chance."""

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.keys import OffloadKey
from kvtier.policies import EvictionPolicy


class SecondChance(EvictionPolicy):
    """First in, first out; a chunk that a request has read goes to the back once."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        # in order of age, oldest first; the value is whether the chunk was read
        self._queue: OrderedDict[OffloadKey, bool] = OrderedDict()

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        for key in reversed(keys):  # The tail of a prompt is evicted first.
            self._queue[key] = used

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self._queue[key]

    def evict(self, count: int) -> list[OffloadKey]:
        evicted: list[OffloadKey] = []
        while self._queue and len(evicted) < count:
            key, was_read = self._queue.popitem(last=False)
            if was_read:
                self._queue[key] = False
            else:
                evicted.append(key)
        return evicted

    def clear(self) -> None:
        self._queue.clear()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: object) -> bool:
        return key in self._queue
