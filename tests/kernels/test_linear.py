import pytest
import torch

from limpet.kernels import linear
from limpet.kernels.linear import Tile
from tests.kernels.compare import assert_close, random
from tests.kernels.implementations import ModuleType, both

SHAPES = [(1, 64, 64), (5, 100, 600), (70, 33, 1100)]  # rows, outs, ins


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    num_rows, num_outs, num_ins = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(num_rows, num_ins), (num_outs, num_ins), (num_outs,)]
    return [random(generator, *size, dtype=dtype, device=device) for size in sizes]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@both
@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(
    kernels: ModuleType, shape: tuple[int, int, int], fixed_order: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = operands(shape, dtype, device)
    assert_close("y", kernels.linear(x, weight, fixed_order=fixed_order), exact(x, weight), dtype)
    assert_close("y + b", kernels.linear(x, weight, bias, fixed_order=fixed_order), exact(x, weight, bias), dtype)


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("segment_len", [640, 1152])
def test_every_split_gives_the_product(
    block_rows: int, segment_len: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = operands((5, 100, 1100), dtype, device)
    tile = Tile(block_rows, 32, 128, 4, 2)
    for _ in range(2):  # the second finds what the first left behind
        y = linear.launch(x, weight, bias, tile, segment_len, is_split=segment_len < 1100)
        assert_close("y", y, exact(x, weight, bias), dtype)


@pytest.mark.usefixtures("rowwise_products")
@pytest.mark.parametrize(("num_outs", "num_ins"), [(40, 1100), (96, 1024)])
def test_in_fixed_order_a_row_has_the_same_bits_in_any_company(
    num_outs: int, num_ins: int, device: torch.device
) -> None:
    x, weight, bias = operands((70, num_outs, num_ins), torch.float32, device)
    together = linear.linear(x, weight, bias, fixed_order=True)
    assert not torch.equal(together, exact(x, weight, bias).float())  # the order matters
    for first, count in ((69, 1), (7, 3), (2, 64)):
        part = linear.linear(x[first : first + count], weight, bias, fixed_order=True)
        assert torch.equal(part, together[first : first + count]), f"{count} rows differ"
    tile, segment_len = linear.pick_fixed_order(4)[0], linear.pick_segment_len(num_outs, num_ins, 32)
    assert segment_len < num_ins
    assert torch.equal(linear.launch(x, weight, bias, tile, segment_len, is_split=False), together)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_outs", "num_ins"), [(4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096)])
def test_in_fixed_order_large_products_are_the_same(
    num_outs: int, num_ins: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, _ = operands((2048, num_outs, num_ins), dtype, device)
    together = linear.linear(x, weight, fixed_order=True)
    assert_close("y", together, exact(x, weight), dtype)
    for count in (1, 16, 64, 200, 256, 700):
        assert torch.equal(linear.linear(x[:count], weight, fixed_order=True), together[:count]), f"{count} rows differ"


def test_segments_depend_on_the_weight_alone() -> None:
    lengths = {shape: linear.pick_segment_len(*shape, 64) for shape in ((4096, 4096), (4096, 11008), (32000, 4096))}
    assert lengths == {(4096, 4096): 1024, (4096, 11008): 2752, (32000, 4096): 4096}
