"""What sessions cost: a return from each tier of the cache, idle sessions, the store.

    python -m benchmarks.sessions workspace/model_repository/smollm2 --histories 512 2048 6144

tiers: the first token of a turn of 32 new tokens, its session's blocks being on the device, in host memory, given up.
idle:  memory and time of a step while 8 requests decode, without and beside 10,000 idle sessions of 500 tokens.
store: from the end of a turn to its commit, alone and with 64 turns that end at once.
In process, greedy, prefix caching off. Writes benchmarks/results/<date>-<machine>-sessions.jsonl.
"""

import argparse
import gc
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from rich.progress import track

from limpet.backend.config import EngineConfig
from limpet.backend.core import CachedPrefix
from limpet.backend.history import History, Turn, token_array
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.service import EngineService
from limpet.backend.session_store import SessionStore, StoredSession, StoreError
from limpet.backend.sessions import SessionTable
from limpet.benchmarks import result
from limpet.benchmarks.engine_result import engine_result
from limpet.benchmarks.result import Result
from limpet.benchmarks.session_driver import SessionDriver
from limpet.benchmarks.table import write_page
from limpet.benchmarks.workload import uniform

NEW_TOKENS, ANSWER_TOKENS = 32, 8
NUM_IDLE, IDLE_TOKENS, IDLE_TURNS = 10_000, 500, 4
BATCH, STEPS = 8, 64
AT_ONCE = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


def main() -> None:
    options = _parse()
    lines = [*_tiers(options), *_idle(options), *_store(options)]
    result.append(result.result_path(lines[0].machine, "sessions"), lines)
    write_page()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a converted model's folder")
    parser.add_argument("--histories", type=int, nargs="+", default=[512, 2048, 6144], help="tokens before the turn")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dummy", action="store_true", help="random weights of the model's shape")
    return parser.parse_args()


# ---- a return from each tier


def _tiers(options: argparse.Namespace) -> list[Result]:
    """The device holds the history and its turns: a prompt of that length takes all of their blocks."""
    block_bytes = _block_bytes(options)
    lines = []
    for history in track(options.histories, description="Returns"):
        longest = history + (options.runs + 3) * (NEW_TOKENS + ANSWER_TOKENS)
        num_blocks = -(-longest // 64) + 1
        for host_blocks, tiers in ((2 * num_blocks, ("on the device", "in host memory")), (0, ("given up",))):
            config = _config(
                options,
                cache_bytes=num_blocks * block_bytes,
                host_cache_bytes=host_blocks * block_bytes,
                session_len=longest,
                max_batch_size=1,
            )
            with LocalEngine(options.model, config) as local:
                lines += [_return(options, local, history, tier, longest) for tier in tiers]
    return lines


def _return(options: argparse.Namespace, local: LocalEngine, history: int, tier: str, longest: int) -> Result:
    """The median over the runs, after a warm-up."""
    vocab_size = local.engine.vocab_size
    opening, flood = (uniform(vocab_size, 1, count, 1)[0].prompt for count in (history, longest - 2))
    news = [request.prompt for request in uniform(vocab_size, options.runs + 1, NEW_TOKENS, 1)]
    driver = SessionDriver(local.engine, GREEDY)
    driver.ask("session", opening)
    measured = []
    for new in news:
        if tier != "on the device":
            local.generate([flood], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        measured.append(driver.ask("session", new))
    driver.end("session")
    ttfts = [ttft * 1000 for ttft, _ in measured[1:]]
    return engine_result(
        local,
        options.model,
        part="tiers",
        engine=f"limpet, {tier}",
        in_tok=history,
        cached_tokens=measured[-1][1],
        runs=options.runs,
        ttft_ms_p50=round(statistics.median(ttfts), 2),
        ttft_ms_p99=round(max(ttfts), 2),
    )


# ---- idle sessions


def _idle(options: argparse.Namespace) -> list[Result]:
    """Steps without and with idle sessions take turns, so that both see the same machine."""
    with LocalEngine(options.model, _config(options, session_len=512, max_batch_size=BATCH)) as local:
        tables = {number: SessionTable(idle_timeout_s=3600, max_sessions=NUM_IDLE) for number in (0, NUM_IDLE)}
        gc.collect()
        before = psutil.Process().memory_info().rss
        for number in range(NUM_IDLE):
            _add_idle(tables[NUM_IDLE], str(number))
        gc.collect()
        num_bytes = {0: 0, NUM_IDLE: psutil.Process().memory_info().rss - before}
        steps: dict[int, list[float]] = {0: [], NUM_IDLE: []}
        for _ in track(range(options.runs + 1), description="Steps"):
            for number, table in tables.items():
                steps[number].append(_step_ms(local, table))
        return [
            engine_result(
                local,
                options.model,
                part="idle",
                engine="limpet",
                concurrency=BATCH,
                req=number,
                in_tok=IDLE_TOKENS,
                runs=options.runs,
                step_ms=round(statistics.median(steps[number][1:]), 3),
                mem_gb=round(num_bytes[number] / 1e9, 4),
            )
            for number in tables
        ]


def _add_idle(table: SessionTable, name: str) -> None:
    """A session with its turns, as the engine leaves it behind."""
    size = IDLE_TOKENS // IDLE_TURNS
    for turn in range(IDLE_TURNS):
        lease = table.begin(name, start=turn == 0, end=False, truncate_to=None, rewind=0)
        new = [(len(name) * 7919 + turn * 104729 + place * 31) % 30_000 for place in range(size)]
        sequence = new_sequence(name, [*lease.history.tokens, *new[: size // 2]], GREEDY, frozenset())
        lease.accept(sequence, f'[{{"role": "user", "content": "{name:>{size * 2}}"}}]')
        sequence.tokens += new[size // 2 :]
        references = [(block, f"{name:>28}{block:>4}".encode()) for block in range(-(-len(sequence.tokens) // 64))]
        table.settle(lease, len(new) - size // 2, CachedPrefix(references, len(sequence.tokens) - 1))


def _step_ms(local: LocalEngine, table: SessionTable) -> float:
    """One turn of the engine process's loop, while all rows decode."""
    engine = local.engine
    service = EngineService(engine, table, frozenset(), lambda connection, message: None)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 8, ignore_eos=True)
    for request in uniform(engine.vocab_size, BATCH, 32, STEPS):
        engine.add(new_sequence(request, request.prompt, params, frozenset()))
    for _ in range(4):
        engine.step()
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
        service.expire()
    elapsed = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return elapsed / STEPS * 1000


# ---- the store


def _store(options: argparse.Namespace) -> list[Result]:
    with LocalEngine(options.model, _config(options, session_len=64, max_batch_size=1)) as local:
        return [_stored(local, options, history, count) for history in options.histories for count in (1, AT_ONCE)]


def _stored(local: LocalEngine, options: argparse.Namespace, history: int, count: int) -> Result:
    waits = sorted(_commit_ms(history, count))
    return engine_result(
        local,
        options.model,
        part="store",
        engine="limpet",
        concurrency=count,
        in_tok=history,
        runs=len(waits),
        settle_ms_p50=round(statistics.median(waits), 3),
        settle_ms_p99=round(waits[int(len(waits) * 0.99)], 3),
    )


def _commit_ms(history: int, count: int) -> list[float]:
    """Milliseconds from the end of each of `count` turns that end at once to its confirmation, over 200 rounds."""
    tokens = token_array(range(history))
    kept = History(tokens, [Turn("x" * history, tokens[history // 2 :], history)])
    waits: list[float] = []
    committed = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        store = SessionStore(Path(folder) / "sessions.db", "model", committed.set)
        for _ in range(200):
            num_before = len(waits)
            for number in range(count):
                store.save(StoredSession(str(number), kept, time.time()))
                store.when_stored(_noting(time.perf_counter(), waits))
            while len(waits) < num_before + count:
                committed.wait()
                committed.clear()
                store.run_callbacks()
        store.close()
    return waits


def _noting(started: float, waits: list[float]) -> Any:
    def note(error: StoreError | None) -> None:
        assert error is None, error
        waits.append((time.perf_counter() - started) * 1000)

    return note


# ---- common


def _config(options: argparse.Namespace, **settings: Any) -> EngineConfig:
    return EngineConfig(enable_prefix_caching=False, load_format="dummy" if options.dummy else "auto", **settings)


def _block_bytes(options: argparse.Namespace) -> int:
    with LocalEngine(options.model, _config(options, session_len=64, max_batch_size=1)) as local:
        return local.summary.cache_bytes // local.summary.num_blocks


if __name__ == "__main__":
    main()
