"""How long ranks take to add their hidden states, by size: one-shot through symmetric memory, and NCCL.

python -m benchmarks.all_reduce --gpus 2

Each is captured in a CUDA graph, many in a row, as a decode step has them.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from limpet.backend.ranks.connected import ConnectedGroup, find_store, open_store

HIDDEN = 8192
ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
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
    one_shot = group.one_shot
    if rank == 0:
        print(f"{'KiB':>8}{'one-shot, us':>14}{'NCCL, us':>10}", flush=True)
    for rows in ROWS:
        x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        through_nccl = _time_us(group.all_reduce_in_place, x)
        by_reading = _time_us(one_shot.all_reduce, x) if one_shot is not None and one_shot.takes(x) else float("nan")
        if rank == 0:
            print(f"{x.nbytes // 1024:>8}{by_reading:>14.1f}{through_nccl:>10.1f}", flush=True)
    group.close()


def _time_us(add: Callable[[Tensor], Tensor], x: Tensor) -> float:
    for _ in range(3):
        add(x.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PER_GRAPH):
            add(x)
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
