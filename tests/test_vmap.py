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


@pytest.mark.parametrize("op", [OPS.scatter_add, OPS.scatter_add_], ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2,), (1, 1, 2)], ids=str)
def test_a_member_of_another_shape_is_refused(device, op, shape):
    input = torch.zeros(3, ROWS, 2, device=device)
    index, src = torch.zeros(3, 2, dtype=torch.int64, device=device), torch.ones(3, *shape, device=device)
    with pytest.raises(RuntimeError, match=r"(src has|size of src in dim)"):
        vmap(lambda i, x, s: op(i, 0, x, s))(input, index, src)
    assert not input.cpu().any()


@pytest.mark.parametrize("op", [OPS.scatter_add, OPS.scatter_add_], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16], ids=str)
def test_a_member_index_of_another_dtype_is_refused(device, op, dtype):
    input, src = torch.zeros(3, ROWS, 2, device=device), torch.ones(3, 2, 2, device=device)
    with pytest.raises(RuntimeError, match="index has dtype"):
        vmap(lambda i, x, s: op(i, 0, x, s))(input, torch.zeros(3, 2, dtype=dtype, device=device), src)
    assert not input.cpu().any()


def test_the_refused_index_is_named_as_the_member_has_it(device):
    input, src = torch.zeros(3, 4, 2, device=device), torch.ones(3, 2, 2, device=device)
    index = torch.tensor([[0, 1], [0, 4], [0, 0]], device=device)
    with pytest.raises(IndexError, match=r"index\[3\] is 4; accepted is 0 <= index < 4"):
        vmap(lambda i, x, s: OPS.scatter_add(i, 0, x, s))(input, index, src)


OUTER_AND_INNER = [
    (outer, inner)
    for outer in itertools.product((None, 0), repeat=3)
    for inner in itertools.product((None, 0), repeat=3)
    if any(d == 0 for d in outer) and any(d == 0 for d in inner)
]


def test_nested_vmap_of_any_combination_of_batches(device):
    shapes = ((ROWS, 2), (5,), (5, 2))
    generator = torch.Generator().manual_seed(0)
    for outer, inner in OUTER_AND_INNER:
        operands = []
        for place, shape in enumerate(shapes):
            batches = [size for size, dims in ((2, outer), (3, inner)) if dims[place] == 0]
            high = ROWS if place == 1 else 9
            operand = torch.randint(high, (*batches, *shape), generator=generator)
            operands.append(operand if place == 1 else operand.float())
        expected = vmap(vmap(lambda i, x, s: torch.index_add(i, 0, x, s), inner), outer)(*operands)
        operands = [operand.to(device) for operand in operands]
        got = vmap(vmap(lambda i, x, s: OPS.scatter_add(i, 0, x, s), inner), outer)(*operands)
        assert torch.equal(got.cpu(), expected), (outer, inner)
