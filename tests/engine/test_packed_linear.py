"""Linear layers packed for the CPU compute the same product, for every number of rows."""

import pytest
import torch
from torch import nn

from limpet.backend.layers.linear import Linear, pack_linears


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 64, 300])
def test_a_packed_layer_gives_the_float64_product(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(num_rows)
    layer = Linear(96, 130, bias=has_bias)
    for parameter in layer.parameters():
        parameter.normal_()
    x = torch.randn(num_rows, 2 * 96)[:, 96:]  # rows with a stride, as a slice of heads has
    expected = x.double() @ layer.weight.double().t()
    if layer.bias is not None:
        expected += layer.bias.double()
    layer.pack()
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-5)


def test_packing_keeps_no_second_copy_but_a_tied_embeddings() -> None:
    tied = nn.ModuleDict({"head": Linear(8, 20), "embedding": nn.Embedding(20, 8)})
    head, embedding = tied["head"], tied["embedding"]
    assert isinstance(head, Linear)
    assert isinstance(embedding, nn.Embedding)
    embedding.weight = head.weight
    pack_linears(tied)
    assert head.weight.numel() == 0
    assert embedding.weight.shape == (20, 8)
