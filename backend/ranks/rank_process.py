"""The process of a rank past the first: `python -m limpet.backend.ranks.rank_process PARENT SOCKET`.

It follows what rank 0 says over the inherited socket, and ends with rank 0 however that ends: the kernel kills it then,
even where it hangs in a collective or is stopped.
"""

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1  # prctl(2)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def main() -> int:
    """Exit code 0 if rank 0 said Stop."""
    parent, descriptor = map(int, sys.argv[1:])
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal or service manager sends to all processes
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    from limpet.backend.ranks.follower import Follower  # takes seconds: torch

    return Follower(connection).run()


if __name__ == "__main__":
    sys.exit(main())
