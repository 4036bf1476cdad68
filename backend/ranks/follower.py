"""A rank past the first: a runner that computes what rank 0 planned."""

import logging
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from limpet.backend.build_runner import BuiltRunner, RunnerSettings, build_runner
from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.config import ConfigError
from limpet.backend.log import start_log
from limpet.backend.ranks.connected import ConnectedGroup, find_store
from limpet.backend.ranks.messages import (
    BEAT_S,
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

logger = logging.getLogger("limpet.rank")


class Follower:
    """Says Done when it is made, then does what rank 0 tells it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._sending = threading.Lock()
        self._send(Done())

    def run(self) -> int:
        """Returns the exit code: 0 after Stop, 1 if rank 0 is gone or something failed."""
        join = self._receive()
        assert isinstance(join, Join)
        start_log(f"limpet-rank-{join.rank}", logging.WARNING)
        try:
            return self._follow(join)
        except EOFError:
            return 1
        except (ConfigError, CheckpointError) as error:
            self._send(Refused("ConfigError" if isinstance(error, ConfigError) else "CheckpointError", str(error)))
            return 1
        except RuntimeError as error:  # of torch: another rank is gone, or no memory is left
            logger.error("Rank %d ends: %s", join.rank, str(error).splitlines()[0])
            os._exit(1)  # without waiting for a queue that may hang in a collective

    def _follow(self, join: Join) -> int:
        checkpoint = CheckpointDir(Path(join.model_dir))
        settings = RunnerSettings.of(join.config, checkpoint.model_config(), join.rank)
        config, store = join.config, find_store(join.port)
        ranks = ConnectedGroup(join.rank, config.tp, settings.device, settings.dtype, store, config.all_reduce)
        self._send(Done())
        assert isinstance(self._receive(), Load)
        built = build_runner(checkpoint, config, settings, ranks)
        self._send(Done(built.weight_bytes))
        while not isinstance(command := self._receive(), Stop):
            self._do(command, built)
        built.runner.close()
        ranks.close()
        return 0

    def _do(self, command: Command, built: BuiltRunner) -> None:
        match command:
            case Step(plan):
                built.runner.forward(plan).result.result()
            case Measure():
                self._send(Done(built.measure().cache_bytes))
            case Allocate(num_blocks):
                built.runner.allocate(num_blocks)
                self._send(Done())
            case Capture():
                built.runner.capture()
                self._send(Done())
                threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self._send(Beat())
            except OSError:  # rank 0 is gone, or said Stop
                return

    def _send(self, answer: Answer) -> None:
        with self._sending:
            self._connection.send_bytes(self._encode(answer))

    def _receive(self) -> Command:
        command: Command = self._decode(self._connection.recv_bytes())
        return command
