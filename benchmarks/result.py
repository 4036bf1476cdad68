"""One measured figure: a line of benchmarks/results/*.jsonl, written by a benchmark and never edited."""

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

RESULTS = Path(__file__).parent / "results"

Part = Literal[
    "decode",
    "prefill",
    "sharegpt",
    "fixed",
    "rate",
    "turns",
    "options",
    "start",
    "memory",
    "convert",
    "tiers",
    "idle",
    "store",
]


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A figure is the median of `runs` runs after a warm-up; what does not apply is left out.

    `engine` names what answered, with its version where it is not this repository's. `distinct_last` counts different
    last tokens over the requests: a broken model gives few. `mem_gb` is in 10^9 bytes.
    """

    date: str
    commit: str
    machine: str
    torch: str
    engine: str
    model: str
    part: Part
    gpu: str = ""
    triton: str = ""
    dtype: str = ""
    tp: int = 1
    block_size: int | None = None
    threads: int | None = None
    concurrency: int | None = None
    rate: float | None = None  # requests a second that were sent, at random times (Poisson)
    digest: str = ""
    req: int | None = None
    in_tok: int | None = None
    out_tok: int | None = None
    cached_tokens: int | None = None
    distinct_last: int | None = None
    runs: int = 1
    wall_s: float | None = None
    out_tok_s: float | None = None
    in_tok_s: float | None = None
    req_s: float | None = None
    step_ms: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p99: float | None = None
    tpot_ms_mean: float | None = None
    itl_ms_p99: float | None = None
    settle_ms_p50: float | None = None  # from the end of a session's turn to its confirmation
    settle_ms_p99: float | None = None
    mem_gb: float | None = None
    via: Literal["engine", "grpc", "http"] = "engine"
    front_ends: int | None = None
    deterministic: bool = False


def append(path: Path, results: Iterable[Result]) -> None:
    """Add lines to a result file; it and its folder are made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(result) + b"\n" for result in results)


def read(path: Path) -> list[Result]:
    """The results of one file, in the order they were measured."""
    decoder = msgspec.json.Decoder(Result)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def result_path(machine: str, what: str) -> Path:
    """Today's file of that machine and benchmark; an installed wheel writes where it is called."""
    folder = RESULTS if RESULTS.is_dir() else Path.cwd()
    return folder / f"{today()}-{machine.replace(' ', '-')}-{what}.jsonl"


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def commit() -> str:
    """The checked-out commit, with a plus sign if the tree differs from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


def cpu_machine() -> str:
    """Cores that this process may use, architecture and widest vector unit."""
    flags = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    vectors = next((name for name in ("avx512f", "avx2") if f" {name} " in flags), "")
    return " ".join((f"{len(os.sched_getaffinity(0))}-core", platform.machine(), vectors)).strip()
