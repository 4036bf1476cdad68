"""What Triton's Python backend loads as a Limpet model: a front end, and its engine found or started."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from limpet.backend.chat_template import TemplateError
from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.config import ALIAS_OF, ConfigError, EngineConfig, parse_parameters, read_parameters
from limpet.backend.front_end.front_end import FrontEnd
from limpet.backend.link.connection import EngineConnection
from limpet.backend.link.keeper import EngineKeeper, EngineStartError
from limpet.backend.link.messages import Hello
from limpet.backend.link.ownership import (
    EngineRuntime,
    OwnershipError,
    runtime_root,
    settings_digest,
    sweep_dead_engines,
)
from limpet.backend.log import start_log

# A thread that runs Python code holds up each `send` by this long (5 ms by default).
_SWITCH_INTERVAL_S = 0.0005
_TRITONS_OWN_PARAMETERS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
_REFUSALS = (CheckpointError, ConfigError, TemplateError, EngineStartError, OwnershipError)


class TritonPythonModel:
    """Triton's callbacks; a decoupled model answers through response senders."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Blocks until the engine is ready; raises TritonModelException with the reason if it does not get so far."""
        prepare_process()
        folder, model_config = Path(args["model_repository"]), json.loads(args["model_config"])
        try:
            model_dir, parameters = _served(folder, _parameters(model_config))
            config = parse_parameters(parameters)
            CheckpointDir(model_dir).manifest()
            self._connection = _connection(model_dir, parameters, args["model_instance_name"])
            self._front_end = self._start(model_dir, config, streams=_is_decoupled(model_config))
        except _REFUSALS as error:
            raise pb_utils.TritonModelException(f"{folder.name} cannot be served: {error}") from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes requests over; never raises, since Triton would show a traceback to the client."""
        for request in requests:
            self._front_end.accept(request)

    def finalize(self) -> None:
        """Called once all requests are answered."""
        self._front_end.stop()

    def _start(self, model_dir: Path, config: EngineConfig, *, streams: bool) -> FrontEnd:
        """Read tokenizer and template while the engine loads its weights."""
        self._connection.start()
        try:
            front_end = FrontEnd(model_dir, config, self._connection, streams=streams)
            self._connection.wait_ready()
        except _REFUSALS:
            self._connection.stop()
            raise
        return front_end


def prepare_process() -> None:
    """Refuse an environment that would answer wrongly, and set this process up; raises TritonModelException."""
    if int(np.__version__.split(".")[0]) >= 2:
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__} is installed, with which Triton's Python backend delivers wrong tensors: install "
            "numpy<2 in the server's environment."
        )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    start_log("limpet")


def shm_region() -> str | None:
    """This stub's file in /dev/shm, which is one of its command line's arguments."""
    arguments = Path("/proc/self/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    names = [argument for argument in arguments[1:] if argument and "/" not in argument.strip("/")]
    return next((name for name in names if (Path("/dev/shm") / name.strip("/")).is_file()), None)


def _parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    return {name: value["string_value"] for name, value in model_config.get("parameters", {}).items()}


def _is_decoupled(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _served(folder: Path, parameters: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """Folder and settings of the model that answers: an alias has those of the one that it names."""
    target = parameters.get(ALIAS_OF)
    if target is None:
        return folder, _engine_settings(parameters)
    if set(_engine_settings(parameters)) != {ALIAS_OF}:
        raise ConfigError(f"An alias has the parameter {ALIAS_OF} only: change the settings of {target}.")
    model_dir = folder.parent / Path(target).name
    return model_dir, _engine_settings(read_parameters(model_dir))


def _engine_settings(parameters: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if name not in _TRITONS_OWN_PARAMETERS}


def _connection(model_dir: Path, parameters: Mapping[str, str], instance: str) -> EngineConnection:
    server_pid = os.getppid()
    sweep_dead_engines(runtime_root())
    runtime = EngineRuntime.for_model(model_dir, server_pid)
    keeper = EngineKeeper(
        runtime, settings_digest(parameters), lambda: runtime.spawn(model_dir, server_pid, parameters)
    )
    hello = Hello(front_end=instance, pid=os.getpid(), role="front_end", shm_region=shm_region())
    return EngineConnection(runtime, keeper, hello)
