"""Ranks connected by torch.distributed: gloo between CPU processes, NCCL between GPUs, on one machine."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from limpet.backend.ranks.group import RankGroup

if TYPE_CHECKING:
    from limpet.backend.ranks.one_shot import OneShotSum

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.13
LOOPBACK = "127.0.0.1"
COLLECTIVE_DEADLINE_S = 60.0  # one rank waits so long for the others before it fails


def open_store() -> tuple[TCPStore, int]:
    """Rank 0's end of where the ranks meet, and its port; other machines do not reach it."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
            master_listen_fd=listener.detach(),
        )
    return store, port


def find_store(port: int) -> TCPStore:
    """The other ranks' end."""
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S))


class ConnectedGroup(RankGroup):
    """Returns once all ranks are there; one at a time in a process. Sums are of `dtype`; raises ConfigError."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        store: TCPStore,
        all_reduce: Literal["auto", "nccl"],
    ) -> None:
        super().__init__(rank, size)
        self._store = store  # rank 0's end serves the others until they are gone
        _stay_on_this_machine()
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
            device_id=device if on_cuda else None,
        )
        self.one_shot: OneShotSum | None = None
        if on_cuda and all_reduce == "auto":
            from limpet.backend.ranks.one_shot import open_one_shot  # takes time, and no CPU has it

            self.one_shot = open_one_shot(rank, size, device, dtype)

    @property
    def way_of_adding(self) -> str:
        if self.one_shot is None:
            return dist.get_backend()
        return f"symmetric memory up to {self.one_shot.max_bytes >> 10} KiB, else {dist.get_backend()}"

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_reduce_begun(self, x: Tensor) -> Callable[[], object]:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        return lambda: work.wait()

    def norm_adds(self, x: Tensor) -> bool:
        return self.one_shot is not None and self.one_shot.takes(x)

    def add_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert self.one_shot is not None
        return self.one_shot.add_and_norm(x, residual, weight, eps)

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        gathered = x.new_empty(self.size * x.shape[0], x.shape[1])
        _all_gather(gathered, x)
        columns = torch.cat(gathered.chunk(self.size), dim=1)
        return columns if columns.shape[1] == num_columns else columns[:, :num_columns].contiguous()

    def share(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def close(self) -> None:
        self.one_shot = None
        dist.destroy_process_group()


def _stay_on_this_machine() -> None:
    """Connect through the loopback interface alone, and without NVLink multicast, which a fault can wedge."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
