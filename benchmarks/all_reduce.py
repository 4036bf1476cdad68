"""How long ranks take for the sum of their hidden states and its norm, by size: one kernel through symmetric memory,
and NCCL with the norm behind it.

python -m benchmarks.all_reduce --gpus 2

Each is captured in a CUDA graph, many in a row, as a decode step has them.
"""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from limpet.backend.ranks.connected import ConnectedGroup, find_store, open_store
from limpet.kernels.rms_norm import rms_norm

HIDDEN = 8192
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
PER_GRAPH, REPLAYS = 100, 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.all_reduce")
    parser.add_argument("--gpus", type=int, default=2)
    size = parser.parse_args().gpus
    store, port = open_store()
    spawn(_measure, (size, port), nprocs=size)  # type: ignore[no-untyped-call]
    del store


def _measure(rank: int, size: int, port: int) -> None:
    device = torch.device("cuda", rank)
    group = ConnectedGroup(rank, size, device, torch.bfloat16, find_store(port), "auto")
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    if rank == 0:
        print(f"{'KiB':>8}{'one kernel, us':>16}{'NCCL, norm, us':>16}", flush=True)
    for rows in ROWS:
        x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)
        through_nccl = _time_us(lambda x=x, r=residual: rms_norm(group.all_reduce(x), weight, 1e-5, r))  # type: ignore[misc]
        at_once = math.nan
        if group.norm_adds(x):
            at_once = _time_us(lambda x=x, r=residual: group.add_and_norm(x, r, weight, 1e-5))  # type: ignore[misc]
        if rank == 0:
            print(f"{x.nbytes // 1024:>8}{at_once:>16.1f}{through_nccl:>16.1f}", flush=True)
    group.close()


def _time_us(add: Callable[[], Tensor]) -> float:
    for _ in range(3):
        add()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PER_GRAPH):
            add()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / (REPLAYS * PER_GRAPH)


if __name__ == "__main__":
    main()
