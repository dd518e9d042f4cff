"""torch.func.vmap over the operators: every operand batched or shared, in every batch dimension, against vmap of index_add."""

import itertools

import pytest
import torch
from torch.func import grad, vmap

OPS = torch.ops.neuron
BATCH, ROWS, COUNT, COLUMNS = 3, 5, 7, 2


def operands(dim, dims, device):
    """input, index and src with the batch at the given dimensions; None for one that is shared."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, COLUMNS), (COUNT,), (COUNT, COLUMNS)]
    result = []
    for position, (shape, batch_dim) in enumerate(zip(shapes, dims, strict=True)):
        shape = shape[::-1] if dim % 2 == 1 and position != 1 else shape
        full = list(shape)
        if batch_dim is not None:
            full.insert(batch_dim, BATCH)
        if position == 1:
            result.append(torch.randint(0, ROWS, full, generator=generator).to(device))
        else:
            result.append(torch.randint(-8, 8, full, generator=generator).float().to(device))
    return result


CASES = [
    dims for dims in itertools.product((None, 0, 1, 2), (None, 0, 1), (None, 0, 2)) if any(d is not None for d in dims)
]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_equals_vmap_of_index_add(device, dim):
    for dims in CASES:
        cpu = operands(dim, dims, "cpu")
        expected = vmap(lambda input, index, src: torch.index_add(input, dim, index, src), dims)(*cpu)
        input, index, src = (x.to(device) for x in cpu)
        result = vmap(lambda input, index, src: OPS.scatter_add(input, dim, index, src), dims)(input, index, src)
        assert torch.equal(result.cpu(), expected), dims
        if dims[0] is None:
            continue
        out = vmap(lambda input, index, src: OPS.scatter_add_(input, dim, index, src), dims, out_dims=dims[0])(
            input, index, src
        )
        assert torch.equal(input.cpu(), expected.movedim(0, dims[0])), dims
        assert torch.equal(out, input), dims


def test_nested_vmap(device):
    input, index, src = operands(0, (0, 0, 0), "cpu")
    inputs = torch.stack([input, input * 2])
    nested = vmap(vmap(lambda i, x, s: OPS.scatter_add(i, 0, x, s)), (0, None, None))
    expected = vmap(vmap(lambda i, x, s: torch.index_add(i, 0, x, s)), (0, None, None))(inputs, index, src)
    assert torch.equal(nested(inputs.to(device), index.to(device), src.to(device)).cpu(), expected)


def test_per_sample_gradients(device):
    input, index, src = operands(0, (None, 0, 0), "cpu")

    def loss(s, x, i, call):
        return call(i, 0, x, s).sin().sum()

    got = vmap(grad(loss), (0, 0, None, None))(src.to(device), index.to(device), input.to(device), OPS.scatter_add)
    expected = vmap(grad(loss), (0, 0, None, None))(src, index, input, torch.index_add)
    torch.testing.assert_close(got.cpu(), expected)


def test_an_index_of_one_member_cannot_reach_the_rows_of_another(device):
    for value in (ROWS, -1):
        input, index, src = operands(0, (0, 0, 0), device)
        index[1, 2] = value
        before = input.clone()
        with pytest.raises(IndexError):
            vmap(lambda i, x, s: OPS.scatter_add_(i, 0, x, s))(input, index, src)
        assert torch.equal(input, before)


def test_in_place_on_a_shared_input_is_refused(device):
    input, index, src = operands(0, (None, 0, 0), device)
    with pytest.raises(RuntimeError, match="input has no batch dimension under vmap"):
        vmap(lambda x, s: OPS.scatter_add_(input, 0, x, s))(index, src)
    assert torch.equal(input.cpu(), operands(0, (None, 0, 0), "cpu")[0])
