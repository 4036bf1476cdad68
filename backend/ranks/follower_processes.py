"""Rank 0's hold on the other ranks' processes: starts them, tells them what to do, notices when one ends or hangs."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from limpet.backend.checkpoint import CheckpointError
from limpet.backend.config import ConfigError
from limpet.backend.ranks.messages import (
    Allocate,
    Answer,
    Beat,
    Capture,
    Command,
    Done,
    Join,
    Load,
    Measure,
    Refused,
    Step,
    Stop,
)

HUNG_AFTER_S = 4.0  # silence of a rank that serves
START_DEADLINE_S = 600.0  # of each part of a start
STEP_DEADLINE_S = 60.0  # on a GPU, where collectives in a graph have no deadline of their own
STOP_DEADLINE_S = 10.0
_LOOK_EVERY_MS = 250
_NOTICED_WITHIN_S = 1.0  # the end of a rank, after the others' collectives failed

_DOING: dict[type[Command], str] = {
    Join: "connecting to the others",
    Load: "loading its weights",
    Measure: "measuring its largest step",
    Allocate: "making its cache",
    Capture: "capturing its CUDA graphs",
    Step: "computing steps",
    Stop: "stopping",
}

logger = logging.getLogger(__name__)


class RankError(Exception):
    """A rank did not start, ended, or hangs; one sentence says which one, and what it was doing."""


@dataclass
class _Follower:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: Connection
    pidfd: int
    doing: str = "starting"
    answers: deque[Done] = field(default_factory=deque)
    last_heard: float = field(default_factory=time.monotonic)
    is_open: bool = True

    @property
    def name(self) -> str:
        return f"Rank {self.rank} (process {self.process.pid})"

    @property
    def end(self) -> str | None:
        """How it ended, None if it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class FollowerProcesses:
    """Ranks 1 … size - 1; none where `size` is 1, and then nothing here does anything.

    When one ends or hangs while it should serve, or start, the others are killed and `on_lost` is called with the cause
    by a thread of its own.
    """

    def __init__(self, size: int, num_threads: int, on_lost: Callable[[str], None]) -> None:
        self._size = size
        self._num_threads = num_threads
        self._on_lost = on_lost
        self._followers: list[_Follower] = []
        self._steps: deque[tuple[Future[Any], float]] = deque()
        self._changed = threading.Condition()
        self._spawned = threading.Event()
        self._serving = self._stopping = self._closing = False
        self._lost: str | None = None
        self._refused: Refused | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        # The kernel ends a rank with the thread that started it: so that thread is the one that stays.
        self._watcher = threading.Thread(target=self._watch, name="limpet-ranks", daemon=True)
        if size > 1:
            self._watcher.start()
            self._spawned.wait()

    def tell(self, command: Command) -> None:
        """Send it to all; one that is gone is noticed elsewhere."""
        if not self._followers:
            return
        payload = self._encode(command)
        for follower in self._followers:
            self._send(follower, command, payload)

    def tell_to_join(self, joins: list[Join]) -> None:
        """Each its own."""
        for follower, join in zip(self._followers, joins, strict=True):
            self._send(follower, join, self._encode(join))

    def wait(self) -> list[int]:
        """The answers to the last command, by rank; raises RankError, or what a rank refused with."""
        with self._changed:
            self._changed.wait_for(self._is_decided, START_DEADLINE_S)
            if self._refused is not None:
                kind = ConfigError if self._refused.error == "ConfigError" else CheckpointError
                raise kind(self._refused.message)
            if self._lost is not None:
                raise RankError(self._lost)
            late = [f"{each.name} is still {each.doing}" for each in self._followers if not each.answers]
            if late:
                raise RankError(f"{' and '.join(late)} after {START_DEADLINE_S:g} s; rank 0 waits for that.")
            return [follower.answers.popleft().value for follower in self._followers]

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A start that fails ends them; what fails because one of them ended says so."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                lost = isinstance(error, RuntimeError) and self._changed.wait_for(lambda: self._lost, _NOTICED_WITHIN_S)
            self.kill()
            if lost:
                raise RankError(lost) from error
            raise

    def serve(self) -> None:
        """From now on silence is a fault."""
        for follower in self._followers:
            follower.last_heard = time.monotonic()
        self._serving = True

    def expect(self, step: "Future[Any]") -> None:
        """The step has to end within STEP_DEADLINE_S, or the ranks hang in a collective."""
        while self._steps and self._steps[0][0].done():
            self._steps.popleft()
        self._steps.append((step, time.monotonic()))

    def stop(self) -> None:
        """Let them end; no fault any more."""
        self._stopping = True
        self.tell(Stop())

    def close(self) -> None:
        """Wait until all have ended; those that do not are killed."""
        deadline = time.monotonic() + STOP_DEADLINE_S
        for follower in self._followers:
            try:
                code = follower.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("%s did not stop within %g s: killed.", follower.name, STOP_DEADLINE_S)
            else:
                if code != 0 and self._lost is None:
                    logger.error("%s ended with %s when it was stopped.", follower.name, follower.end)
        self.kill()

    def kill(self) -> None:
        """End them at once."""
        self._stopping = True
        for follower in self._followers:
            follower.process.kill()
        self._closing = True
        if self._size > 1 and threading.current_thread() is not self._watcher:
            self._watcher.join()
        for follower in self._followers:
            follower.process.wait()
            follower.connection.close()

    # ---- the watching thread

    def _watch(self) -> None:
        try:
            for rank in range(1, self._size):
                self._followers.append(self._spawn(rank))
        except OSError as error:
            self._lost = f"Rank {len(self._followers) + 1} cannot be started: {error}."
        finally:
            self._spawned.set()
        poll = select.poll()
        for follower in self._followers:
            poll.register(follower.pidfd, select.POLLIN)
            poll.register(follower.connection.fileno(), select.POLLIN)
        ends = {follower.pidfd for follower in self._followers}
        while not self._closing:
            for descriptor, _ in poll.poll(_LOOK_EVERY_MS):
                if descriptor in ends:
                    poll.unregister(descriptor)  # it stays readable
            for follower in self._followers:
                if follower.is_open and not self._listen(follower):
                    poll.unregister(follower.connection.fileno())
            if not self._stopping and self._refused is None and self._lost is None and (cause := self._fault()):
                self._lose(cause)
        for follower in self._followers:
            os.close(follower.pidfd)

    def _spawn(self, rank: int) -> _Follower:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "limpet.backend.ranks.rank_process",
                str(os.getpid()),
                str(theirs.fileno()),
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": str(self._num_threads)}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()])
        return _Follower(rank, process, Connection(ours.detach()), os.pidfd_open(process.pid))

    def _listen(self, follower: _Follower) -> bool:
        """Take what it said; False if it will say no more."""
        try:
            while follower.connection.poll():
                self._take(follower, self._decode(follower.connection.recv_bytes()))
        except (EOFError, OSError):
            follower.is_open = False
        return follower.is_open

    def _take(self, follower: _Follower, answer: Answer) -> None:
        follower.last_heard = time.monotonic()
        if isinstance(answer, Beat):
            return
        with self._changed:
            if isinstance(answer, Refused):
                self._refused = answer
            else:
                follower.answers.append(answer)
            self._changed.notify_all()

    def _fault(self) -> str | None:
        now = time.monotonic()
        ended = [f"{each.name} ended ({each.end}) while {each.doing}" for each in self._followers if each.end]
        if ended:
            return f"{'; '.join(ended)}."
        if self._serving:
            for follower in self._followers:
                if now - follower.last_heard > HUNG_AFTER_S:
                    return f"{follower.name} hangs: nothing was heard of it for {HUNG_AFTER_S} s."
        if self._steps and not self._steps[0][0].done() and now - self._steps[0][1] > STEP_DEADLINE_S:
            return f"A step has not ended within {STEP_DEADLINE_S:g} s: the ranks hang in a collective."
        return None

    def _lose(self, cause: str) -> None:
        for follower in self._followers:
            follower.process.kill()
        with self._changed:
            self._lost = cause
            self._changed.notify_all()
        threading.Thread(target=self._on_lost, args=(cause,), name="limpet-rank-loss", daemon=True).start()

    # ---- the telling thread

    def _send(self, follower: _Follower, command: Command, payload: bytes) -> None:
        follower.doing = _DOING[type(command)]
        try:
            follower.connection.send_bytes(payload)
        except OSError:
            logger.debug("%s is gone", follower.name)

    def _is_decided(self) -> bool:
        return self._refused is not None or self._lost is not None or all(each.answers for each in self._followers)
