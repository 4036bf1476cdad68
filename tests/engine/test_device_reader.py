from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from limpet.backend import device_reader
from limpet.backend.device_reader import DeviceReader, Wanted

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 1000), (1,), (700, 9), (64, 64), (5, 5, 5)]
    return {
        f"weight {index}": torch.randn(size, generator=generator).to(DTYPES[index % 3])
        for index, size in enumerate(sizes)
    }


def whole(name: str, tensor: torch.Tensor, target: torch.Tensor) -> Wanted:
    return Wanted(name, tuple(slice(0, size) for size in tensor.shape), target)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_tensors_arrive_whatever_their_pieces(
    dtype: torch.dtype | None,
    device: str,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_reader, "PIECE_BYTES", 1024)  # more pieces than buffers
    save_file(tensors, tmp_path / "weights.safetensors")
    targets = {name: torch.full_like(each, float("nan"), dtype=dtype, device=device) for name, each in tensors.items()}
    with DeviceReader(torch.device(device)) as reader:
        reader.fill(tmp_path / "weights.safetensors", [whole(name, tensors[name], targets[name]) for name in tensors])
    for name, each in tensors.items():
        assert torch.equal(targets[name].cpu(), each.to(dtype))


def test_a_file_that_ends_too_early_is_an_error(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    with DeviceReader(torch.device("cpu")) as reader, pytest.raises(OSError, match="ends too early"):
        reader.fill(path, [whole(name, each, torch.empty_like(each)) for name, each in tensors.items()])


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
@pytest.mark.parametrize(
    "source",
    [
        (slice(3, 5), slice(0, 6), slice(0, 8)),
        (slice(0, 7), slice(2, 5), slice(0, 8)),
        (slice(1, 6), slice(1, 6), slice(3, 7)),
        (slice(6, 7), slice(0, 6), slice(0, 1)),
    ],
)
def test_a_slice_of_a_tensor_is_read_alone(
    source: tuple[slice, ...], piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_reader, "PIECE_BYTES", piece_bytes)
    tensor = torch.arange(7 * 6 * 8, dtype=torch.float32).view(7, 6, 8)
    save_file({"before": torch.zeros(5), "weight": tensor}, tmp_path / "weights.safetensors")
    target = torch.full_like(tensor[source], float("nan")).contiguous()
    with DeviceReader(torch.device("cpu")) as reader:
        reader.fill(tmp_path / "weights.safetensors", [Wanted("weight", source, target)])
    assert torch.equal(target, tensor[source])
