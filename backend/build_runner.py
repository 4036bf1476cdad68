"""From a converted model and its settings to a runner: device, dtype, weights, and the room left for a cache."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import torch

from limpet.backend.checkpoint import CheckpointDir, ModelConfig
from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.layers.fixed_order import fix_order
from limpet.backend.layers.linear import pack_linears
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.models.registry import build_model
from limpet.backend.ranks.degrees import check_degree
from limpet.backend.ranks.group import RankGroup
from limpet.backend.runner import Runner
from limpet.backend.weights import fill_with_noise, load_weights

# Prompt tokens of one step: more would hold up running answers for seconds on a CPU.
DEFAULT_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True)
class RunnerSettings:
    """What follows from a model and its settings; the same on all ranks but for the device's number."""

    device: torch.device
    dtype: torch.dtype
    session_len: int  # that is wanted: the cache may hold less
    max_prefill_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, rank: int = 0) -> "RunnerSettings":
        """Raises ConfigError."""
        check_degree(model, config.tp)
        device = _device(config, rank)
        _check_deterministic(config, device)
        tokens = config.max_prefill_token_num or DEFAULT_PREFILL_TOKENS[device.type]
        return cls(device, _dtype(config, model, device), _session_len(config, model), tokens)


@dataclass(frozen=True)
class Room:
    """Device memory of one rank."""

    cache_bytes: int  # that a cache may take
    step_bytes: int = 0  # of the largest step's intermediate results; this and what follows on CUDA only
    base_bytes: int = 0  # of CUDA itself: context, libraries, kernels


@dataclass(frozen=True)
class BuiltRunner:
    """A runner with its weights, not yet with a cache."""

    runner: Runner
    model: CausalLM
    config: EngineConfig
    settings: RunnerSettings
    weight_bytes: int
    load_s: float  # which the weights took

    def block_bytes(self) -> int:
        return self.model.cache_layout.block_bytes(self.config.cache_block_seq_len, self.settings.dtype)

    def measure(self) -> Room:
        """On CUDA by running the largest step."""
        config, device = self.config, self.settings.device
        if device.type == "cpu":
            return Room(config.cache_bytes or psutil.virtual_memory().available // (4 * config.tp))
        step_bytes = self.runner.measure()
        free, total = torch.cuda.mem_get_info(device)
        base_bytes = int(total - free - torch.cuda.memory_reserved(device))
        return Room(
            config.cache_bytes or int((free - step_bytes) * config.cache_max_entry_count), step_bytes, base_bytes
        )


def build_runner(
    checkpoint: CheckpointDir, config: EngineConfig, settings: RunnerSettings, ranks: RankGroup
) -> BuiltRunner:
    """Load this rank's weights; raises CheckpointError."""
    model_config = checkpoint.model_config()
    with ThreadPoolExecutor(max_workers=1) as loader:  # see _load
        model, weight_bytes, load_s = loader.submit(
            _load, checkpoint, model_config, config.load_format, settings, ranks
        ).result()
    if config.deterministic:
        fix_order(model)
    runner = Runner(
        model,
        model_config,
        block_size=config.cache_block_seq_len,
        num_rows=config.max_batch_size,
        session_len=settings.session_len,
        max_prefill_tokens=settings.max_prefill_tokens,
        device=settings.device,
        dtype=settings.dtype,
        host_cache_bytes=config.host_cache_bytes,
    )
    return BuiltRunner(runner, model, config, settings, weight_bytes, load_s)


def _load(
    checkpoint: CheckpointDir, config: ModelConfig, load_format: str, settings: RunnerSettings, ranks: RankGroup
) -> tuple[CausalLM, int, float]:
    """The model, its weights' bytes, and the seconds they took. Call it in a thread that ends before the engine works.

    OpenMP keeps a team of threads for every thread that computed. Once the teams have more threads than the machine
    has cores, idle ones sleep instead of spinning, and the many short products of a decode step wait for them to wake:
    SmolLM2 on 2 cores took 28 ms a step beside the loader's team, 20 ms without it.
    """
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)  # of this thread
    model = build_model(config, settings.session_len, settings.device, settings.dtype, ranks)
    started = time.monotonic()
    weight_bytes = load_weights(model, checkpoint) if load_format == "auto" else fill_with_noise(model, ranks.rank)
    load_s = time.monotonic() - started
    if settings.device.type == "cpu" and settings.dtype == torch.float32:
        pack_linears(model)
    return model, weight_bytes, load_s


def _device(config: EngineConfig, rank: int) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA GPU: use cpu or auto.")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.tp > torch.cuda.device_count():
        raise ConfigError(f"tp is {config.tp}: torch finds {torch.cuda.device_count()} GPUs, give at most that.")
    return torch.device("cuda", rank)


def _check_deterministic(config: EngineConfig, device: torch.device) -> None:
    if config.deterministic and device.type != "cuda":
        raise ConfigError("deterministic is true, which needs a GPU: on the CPU the allowed value is false.")
    if config.deterministic and config.tp > 1:
        raise ConfigError(
            f"deterministic is true and tp is {config.tp}: sums over GPUs have no fixed order; give tp 1."
        )


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _session_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if model.sliding_window is not None:  # attention is full here: a longer context would be silently wrong
        limit = min(limit, model.sliding_window)
    if config.session_len is not None and config.session_len > limit:
        raise ConfigError(f"session_len is {config.session_len}, the model's limit is {limit}: give at most that.")
    return config.session_len or limit
