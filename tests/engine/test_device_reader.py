from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from limpet.backend import device_reader
from limpet.backend.device_reader import DeviceReader

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 1000), (1,), (700, 9), (64, 64), (5, 5, 5)]
    return {
        f"weight {index}": torch.randn(size, generator=generator).to(DTYPES[index % 3])
        for index, size in enumerate(sizes)
    }


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
        reader.fill(tmp_path / "weights.safetensors", targets)
    for name, each in tensors.items():
        assert torch.equal(targets[name].cpu(), each.to(dtype))


def test_a_file_that_ends_too_early_is_an_error(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])
    with DeviceReader(torch.device("cpu")) as reader, pytest.raises(OSError, match="ends too early"):
        reader.fill(path, {name: torch.empty_like(each) for name, each in tensors.items()})
