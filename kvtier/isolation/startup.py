"""Whether the process of the tiers can be started here at all."""

from __future__ import annotations

import threading


class Startup:
    """A question that is decided once, by whoever comes first.

    The supervisor decides it when the first process says that it runs, or has ended without a word; the owner
    when it waits no longer. From then on a process that ends is started anew.

    Args:
        patience_s: seconds that the owner waits; 0 where nothing is asked.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._open = [None] if patience_s else []  # whoever takes what is in it decides
        self._failure = ""
        self._decided = threading.Event()
        if not patience_s:
            self._decided.set()

    def decide(self, failure: str = "") -> bool:
        """Decide it, unless it is decided; say whether this call did.

        Args:
            failure: why no process can be started; empty where one can.
        """
        try:
            self._open.pop()
        except IndexError:
            return False
        self._failure = failure
        self._decided.set()
        return True

    def wait(self) -> str:
        """Wait for the decision; return the failure, empty where there was none in time."""
        self._decided.wait(self._patience_s)
        self.decide()
        self._decided.wait()  # the supervisor may be about to
        return self._failure
