"""From a converted model and its settings to an engine: device, dtype, weights, cache size, the longest context."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from limpet.backend.block_pool import BlockPool
from limpet.backend.cache_manager import CacheManager
from limpet.backend.checkpoint import CheckpointDir, ModelConfig
from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.guide_compiler import GuideCompiler
from limpet.backend.host_tier import HostTier
from limpet.backend.layers.fixed_order import fix_order
from limpet.backend.layers.linear import pack_linears
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.models.registry import build_model
from limpet.backend.runner import Runner
from limpet.backend.scheduler import Scheduler
from limpet.backend.weights import fill_with_noise, load_weights

# Prompt tokens of one step: more would hold up running answers for seconds on a CPU.
DEFAULT_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True)
class EngineSummary:
    """What was derived at start, for the log and op `status`."""

    device: str
    dtype: str
    weight_bytes: int
    load_s: float  # which the weights took
    cache_bytes: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_batch_size: int
    max_prefill_token_num: int
    session_len: int
    deterministic: bool
    step_bytes: int  # of the largest step's intermediate results; this and what follows on CUDA only
    graph_bytes: int
    base_bytes: int  # of CUDA itself: context, libraries, kernels
    graph_decodes: list[int]  # batch sizes of decodes with a CUDA graph
    graph_tokens: list[int]  # tokens of steps with prefills that have one

    @property
    def total_bytes(self) -> int:
        """Of device memory, at most (CUDA)."""
        return self.weight_bytes + self.cache_bytes + self.step_bytes + self.graph_bytes + self.base_bytes

    def lines(self) -> list[str]:
        gib = 1 << 30
        lines = [
            f"device {self.device}, dtype {self.dtype}, weights {self.weight_bytes / gib:.2f} GiB, loaded in "
            f"{self.load_s:.1f} s ({self.weight_bytes / 1e9 / self.load_s:.1f} GB/s)",
            f"cache {self.cache_bytes / gib:.2f} GiB: {self.num_blocks} blocks of {self.block_size} tokens",
            *([f"host tier: {self.num_host_blocks} blocks"] if self.num_host_blocks else []),
            f"longest session {self.session_len} tokens, {self.max_batch_size} slots, "
            f"{self.max_prefill_token_num} prompt tokens a step",
        ]
        if self.deterministic:
            lines.append("deterministic: a request gives the same ids in any batch")
        if self.graph_decodes:
            lines.append(
                f"device memory {self.total_bytes / gib:.2f} GiB: weights and cache, largest step "
                f"{self.step_bytes / gib:.2f}, CUDA graphs {self.graph_bytes / gib:.2f}, CUDA itself "
                f"{self.base_bytes / gib:.2f}"
            )
            lines.append(f"CUDA graphs for decodes of {', '.join(map(str, self.graph_decodes))} rows")
        if self.graph_tokens:
            lines.append(f"CUDA graphs for mixed steps of {', '.join(map(str, self.graph_tokens))} tokens")
        return lines


def build_engine(model_dir: Path, config: EngineConfig) -> tuple[Engine, EngineSummary]:
    """Load a converted model; raises ConfigError or CheckpointError with one sentence."""
    checkpoint = CheckpointDir(model_dir)
    model_config = checkpoint.model_config()
    device = _device(config)
    dtype = _dtype(config, model_config, device)
    _check_deterministic(config, device)
    wanted_len = _wanted_session_len(config, model_config)
    with ThreadPoolExecutor(max_workers=1) as loader:  # see _load
        load = loader.submit(_load, checkpoint, model_config, config.load_format, wanted_len, device, dtype)
        model, weight_bytes, load_s = load.result()
    if config.deterministic:
        fix_order(model)
    prefill_tokens = config.max_prefill_token_num or DEFAULT_PREFILL_TOKENS[device.type]
    runner = Runner(
        model,
        model_config,
        block_size=config.cache_block_seq_len,
        num_rows=config.max_batch_size,
        session_len=wanted_len,
        max_prefill_tokens=prefill_tokens,
        device=device,
        dtype=dtype,
        host_cache_bytes=config.host_cache_bytes,
    )
    step_bytes = runner.measure() if device.type == "cuda" else 0
    base_bytes = _base_bytes(device)
    block_bytes = model.cache_layout.block_bytes(config.cache_block_seq_len, dtype)
    cache_bytes = _cache_bytes(config, device, step_bytes)
    num_blocks = min(cache_bytes // block_bytes, _useful_blocks(config, wanted_len))
    session_len = min(wanted_len, num_blocks * config.cache_block_seq_len)
    if session_len < 2:
        raise ConfigError(f"The cache holds no block: one takes {block_bytes} bytes; raise cache_bytes.")
    if config.host_cache_bytes and not runner.num_host_blocks:
        raise ConfigError(f"host_cache_bytes holds no block: one takes {block_bytes} bytes; give 0 or more than that.")
    runner.allocate(num_blocks)
    captured = runner.capture()
    cache = CacheManager(
        BlockPool(num_blocks, config.cache_block_seq_len),
        enable_prefix_caching=config.enable_prefix_caching,
        host=HostTier(runner.num_host_blocks) if runner.num_host_blocks else None,
        num_ahead=-(-prefill_tokens // config.cache_block_seq_len) + config.max_batch_size,
    )
    scheduler = Scheduler(
        cache, max_rows=config.max_batch_size, max_prefill_tokens=prefill_tokens, max_waiting=config.max_waiting
    )
    summary = EngineSummary(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=weight_bytes,
        load_s=load_s,
        cache_bytes=num_blocks * block_bytes,
        num_blocks=num_blocks,
        num_host_blocks=runner.num_host_blocks,
        block_size=config.cache_block_seq_len,
        max_batch_size=config.max_batch_size,
        max_prefill_token_num=prefill_tokens,
        session_len=session_len,
        deterministic=config.deterministic,
        step_bytes=step_bytes,
        graph_bytes=runner.graph_bytes,
        base_bytes=base_bytes,
        graph_decodes=[shape.num_decodes for shape in captured.decodes],
        graph_tokens=[shape.num_tokens for shape in captured.mixed],
    )
    guides = GuideCompiler(checkpoint, model_config.vocab_size, model_config.eos_token_ids)
    engine = Engine(
        runner, scheduler, cache, session_len=session_len, vocab_size=model_config.vocab_size, guides=guides
    )
    return engine, summary


def _load(
    checkpoint: CheckpointDir,
    config: ModelConfig,
    load_format: str,
    session_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[CausalLM, int, float]:
    """The model, its weights' bytes, and the seconds they took. Call it in a thread that ends before the engine works.

    OpenMP keeps a team of threads for every thread that computed. Once the teams have more threads than the machine
    has cores, idle ones sleep instead of spinning, and the many short products of a decode step wait for them to wake:
    SmolLM2 on 2 cores took 28 ms a step beside the loader's team, 20 ms without it.
    """
    model = build_model(config, session_len, device, dtype)
    started = time.monotonic()
    weight_bytes = load_weights(model, checkpoint) if load_format == "auto" else fill_with_noise(model)
    load_s = time.monotonic() - started
    if device.type == "cpu" and dtype == torch.float32:
        pack_linears(model)
    return model, weight_bytes, load_s


def _device(config: EngineConfig) -> torch.device:
    if config.tp != 1:
        raise ConfigError(f"tp is {config.tp}: this release runs on one device; allowed is 1.")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA GPU: use cpu or auto.")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def _check_deterministic(config: EngineConfig, device: torch.device) -> None:
    if config.deterministic and device.type != "cuda":
        raise ConfigError("deterministic is true, which needs a GPU: on the CPU the allowed value is false.")


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _wanted_session_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if model.sliding_window is not None:  # attention is full here: a longer context would be silently wrong
        limit = min(limit, model.sliding_window)
    if config.session_len is not None and config.session_len > limit:
        raise ConfigError(f"session_len is {config.session_len}, the model's limit is {limit}: give at most that.")
    return config.session_len or limit


def _cache_bytes(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    if config.cache_bytes is not None:
        return config.cache_bytes
    if device.type == "cpu":
        return psutil.virtual_memory().available // 4
    free, _ = torch.cuda.mem_get_info(device)
    return int((free - step_bytes) * config.cache_max_entry_count)


def _base_bytes(device: torch.device) -> int:
    """Device memory that is not torch's: measured when all kernels have run."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _useful_blocks(config: EngineConfig, session_len: int) -> int:
    """Every slot at full length, and as much again for idle sessions and prefixes."""
    return 2 * config.max_batch_size * -(-session_len // config.cache_block_seq_len)
