"""From a converted model and its settings to an engine: runners on all ranks, cache size, the longest context."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from limpet.backend.block_pool import BlockPool
from limpet.backend.build_runner import BuiltRunner, Room, RunnerSettings, build_runner
from limpet.backend.cache_manager import CacheManager
from limpet.backend.checkpoint import CheckpointDir, ModelConfig
from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.guide_compiler import GuideCompiler
from limpet.backend.host_tier import HostTier
from limpet.backend.ranks.connected import ConnectedGroup, open_store
from limpet.backend.ranks.follower_processes import FollowerProcesses
from limpet.backend.ranks.group import ALONE, RankGroup
from limpet.backend.ranks.leader import Leader
from limpet.backend.ranks.messages import Allocate, Capture, Join, Load, Measure
from limpet.backend.scheduler import Scheduler
from limpet.backend.step_graphs import Ladders

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSummary:
    """What was derived at start, for the log and op `status`."""

    device: str
    dtype: str
    tp: int
    way_of_adding: str  # of ranks
    weight_bytes: int  # of the largest rank; memory here is that of one rank
    load_s: float  # which the weights took
    cache_bytes: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_batch_size: int
    max_prefill_token_num: int
    session_len: int
    vocab_size: int
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
        if self.tp > 1:
            lines.append(f"tp {self.tp}: that much of weights and cache on each rank; they add by {self.way_of_adding}")
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


def build_engine(
    model_dir: Path, config: EngineConfig, on_lost: Callable[[str], None] = logger.error
) -> tuple[Engine, EngineSummary]:
    """Load a converted model, with `config.tp` - 1 processes beside this one.

    Raises ConfigError, CheckpointError or RankError with one sentence. If a rank is lost the others are killed and a
    thread calls `on_lost` with the cause; this rank's steps then fail, or hang on a GPU.
    """
    model_config = CheckpointDir(model_dir).model_config()
    settings = RunnerSettings.of(config, model_config)
    num_threads = max(1, torch.get_num_threads() // config.tp)
    followers = FollowerProcesses(config.tp, num_threads, on_lost)
    with followers.starting():
        started = _start(followers, model_dir, config, settings, num_threads)
    followers.serve()
    summary = started.summary(model_config)
    cache = CacheManager(
        BlockPool(summary.num_blocks, summary.block_size),
        enable_prefix_caching=config.enable_prefix_caching,
        host=HostTier(summary.num_host_blocks) if summary.num_host_blocks else None,
        num_ahead=-(-settings.max_prefill_tokens // summary.block_size) + config.max_batch_size,
    )
    scheduler = Scheduler(
        cache,
        max_rows=config.max_batch_size,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_waiting=config.max_waiting,
    )
    runner = started.built.runner
    engine = Engine(
        runner if config.tp == 1 else Leader(runner, followers, started.ranks),
        scheduler,
        cache,
        session_len=summary.session_len,
        vocab_size=model_config.vocab_size,
        guides=GuideCompiler(CheckpointDir(model_dir), model_config.vocab_size, model_config.eos_token_ids),
    )
    return engine, summary


@dataclass(frozen=True)
class _Started:
    """This rank's runner, ready for steps like those of all others."""

    ranks: RankGroup
    built: BuiltRunner
    weight_bytes: int  # of the largest rank
    room: Room
    num_blocks: int
    captured: Ladders

    def summary(self, model: ModelConfig) -> EngineSummary:
        config, settings, runner = self.built.config, self.built.settings, self.built.runner
        return EngineSummary(
            device=str(settings.device),
            dtype=str(settings.dtype).removeprefix("torch."),
            tp=config.tp,
            way_of_adding=self.ranks.way_of_adding,
            weight_bytes=self.weight_bytes,
            load_s=self.built.load_s,
            cache_bytes=self.num_blocks * self.built.block_bytes(),
            num_blocks=self.num_blocks,
            num_host_blocks=runner.num_host_blocks,
            block_size=config.cache_block_seq_len,
            max_batch_size=config.max_batch_size,
            max_prefill_token_num=settings.max_prefill_tokens,
            session_len=min(settings.session_len, self.num_blocks * config.cache_block_seq_len),
            vocab_size=model.vocab_size,
            deterministic=config.deterministic,
            step_bytes=self.room.step_bytes,
            graph_bytes=runner.graph_bytes,
            base_bytes=self.room.base_bytes,
            graph_decodes=[shape.num_decodes for shape in self.captured.decodes],
            graph_tokens=[shape.num_tokens for shape in self.captured.mixed],
        )


def _start(
    followers: FollowerProcesses, model_dir: Path, config: EngineConfig, settings: RunnerSettings, num_threads: int
) -> _Started:
    """Weights, caches and graphs of all ranks."""
    ranks = _connect(followers, model_dir, config, settings, num_threads)
    followers.tell(Load())
    built = build_runner(CheckpointDir(model_dir), config, settings, ranks)
    weight_bytes = max([built.weight_bytes, *followers.wait()])
    return _Started(ranks, built, weight_bytes, *_allocate(built, followers))


def _connect(
    followers: FollowerProcesses, model_dir: Path, config: EngineConfig, settings: RunnerSettings, num_threads: int
) -> RankGroup:
    """This rank, once all others are connected with it."""
    if config.tp == 1:
        return ALONE
    if settings.device.type == "cpu":
        torch.set_num_threads(num_threads)
    followers.wait()  # until they run
    store, port = open_store()
    followers.tell_to_join([Join(rank, str(model_dir), config, port) for rank in range(1, config.tp)])
    ranks = ConnectedGroup(0, config.tp, settings.device, settings.dtype, store, config.all_reduce)
    followers.wait()
    return ranks


def _allocate(built: BuiltRunner, followers: FollowerProcesses) -> tuple[Room, int, Ladders]:
    """Make the caches, of so many blocks as the rank with the least room holds, and capture the graphs."""
    config = built.config
    followers.tell(Measure())
    room = built.measure()
    cache_bytes = min([room.cache_bytes, *followers.wait()])
    num_blocks = min(cache_bytes // built.block_bytes(), _useful_blocks(config, built.settings.session_len))
    if num_blocks * config.cache_block_seq_len < 2:
        raise ConfigError(f"The cache holds no block: one takes {built.block_bytes()} bytes; raise cache_bytes.")
    if config.host_cache_bytes and not built.runner.num_host_blocks:
        raise ConfigError(
            f"host_cache_bytes holds no block: one takes {built.block_bytes()} bytes; give 0 or more than that."
        )
    followers.tell(Allocate(num_blocks))
    built.runner.allocate(num_blocks)
    followers.wait()
    followers.tell(Capture())
    captured = built.runner.capture()
    followers.wait()
    return room, num_blocks, captured


def _useful_blocks(config: EngineConfig, session_len: int) -> int:
    """Every slot at full length, and as much again for idle sessions and prefixes."""
    return 2 * config.max_batch_size * -(-session_len // config.cache_block_seq_len)
