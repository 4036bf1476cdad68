"""What an engine's process does about a lost rank: it ends, so that the front ends start a whole one."""

import logging
import os
import threading
from collections.abc import Callable

from limpet.backend.ranks.follower_processes import RankError

GRACE_S = 1.0  # for the main thread to notice: it may hang in a collective

logger = logging.getLogger(__name__)


class RankLoss:
    """`happen` is for the thread that notices, `check` for the main thread."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None  # the main thread
        self._cause = ""
        self._happened = threading.Event()
        self._noticed = threading.Event()

    def happen(self, cause: str) -> None:
        self._cause = cause
        self._happened.set()
        self.wake()
        if not self._noticed.wait(GRACE_S):
            logger.error("%s", cause)
            os._exit(1)

    def check(self, within_s: float = 0.0) -> None:
        """Raises RankError if a rank is lost, or found to be within that time."""
        if self._happened.wait(within_s):
            self._noticed.set()
            raise RankError(self._cause)
