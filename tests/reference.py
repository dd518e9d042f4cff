"""The answers tests compare with: float64, and torch on the CPU; and how far apart a right answer may be.

Nothing here uses the product.
"""

import math

import torch

UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}


def torch_cpu(input, index, src, dim=0, alpha=1):
    """torch.index_add on the CPU; src is widened to input's dtype, which loses nothing."""
    return torch.index_add(input.cpu(), dim, index.cpu().long(), src.cpu().to(input.dtype), alpha=alpha)


def float64(input, index, src, dim=0, alpha=1):
    """The same sum in float64."""
    return torch.index_add(input.cpu().double(), dim, index.cpu().long(), src.cpu().double(), alpha=alpha)


GROUP_ROWS, TILE_ROWS = 512, 128


def kernel_stores(input, index, src, group_rows=GROUP_ROWS):
    """How often the NKI kernel may round a row of input to its dtype: once for each group of rows of src that names it.

    Groups hold 512 rows as the planner has them, or 128 where something is not finite or input holds -0.0.
    """
    special = bool((~src.isfinite()).any() or (~input.isfinite()).any() or ((input == 0) & input.signbit()).any())
    return -(-index.numel() // (TILE_ROWS if special else group_rows))


def tolerance(input, index, src, dim=0, alpha=1, by_kernel=False, group_rows=GROUP_ROWS):
    """Largest distance of a right result from `float64`, one number an element.

    With S = |input| + sum |alpha * src| over the n rows of an element, p roundings in sequence with unit roundoff u leave an error
    of at most ((1 + u)**p - 1) * S (Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1). Counted are: in
    float32 (float64 for float64) one rounding for alpha and one for the addition of each of the n rows, and one more addition;
    in input's dtype one rounding a store, which is up to once a row in torch's CPU kernels and `kernel_stores` in the NKI kernel.
    Underflow adds half the smallest subnormal a rounding.
    """
    magnitude = float64(input.abs(), index, src.abs(), dim, abs(alpha))
    ones = torch.ones(src.shape, dtype=torch.float64)
    terms = torch.index_add(torch.zeros(input.shape, dtype=torch.float64), dim, index.cpu().long(), ones)
    stores = terms.clamp(max=kernel_stores(input.cpu(), index, src.cpu(), group_rows)) if by_kernel else terms
    unit = UNIT_ROUNDOFF[input.dtype]
    accumulator = min(unit, UNIT_ROUNDOFF[torch.float32])
    growth = torch.expm1((2 * terms + 1) * math.log1p(accumulator) + stores * math.log1p(unit))
    underflow = torch.finfo(input.dtype).smallest_normal * unit
    return growth * magnitude + (2 * terms + 1) * underflow


def assert_right(result, input, index, src, dim=0, alpha=1, groups_of=None):
    """Compare a result with the float64 answer; NaN and infinities must be where torch has them.

    Rows no index names must come back bit for bit. `groups_of` is the rows of a group where a kernel was launched with its own.
    """
    kernel_dtype = input.dtype in (torch.float32, torch.bfloat16, torch.float16)
    by_kernel = groups_of is not None or (result.device.type == "neuron" and dim == 0 and kernel_dtype)
    result = result.cpu()
    assert result.dtype == input.dtype and result.shape == input.shape
    touched = torch.zeros(input.shape[dim], dtype=torch.bool)
    touched[index.cpu().long()] = True
    untouched = (~touched).nonzero().flatten()
    assert bits_equal(result.index_select(dim, untouched), input.cpu().index_select(dim, untouched))

    if not input.dtype.is_floating_point:
        assert torch.equal(result, torch_cpu(input, index, src, dim, alpha))
        return
    exact = float64(input, index, src, dim, alpha)
    largest = torch.finfo(input.dtype).max
    limit = tolerance(input, index, src, dim, alpha, by_kernel, groups_of or GROUP_ROWS)
    finite = exact.isfinite()
    # Where the finite terms' magnitudes alone exceed the largest number, a partial sum may overflow although the total does
    # not, and meet an infinity of the other sign.
    terms = (torch.where(t.isfinite(), t, 0).abs() for t in (input, src))
    magnitude = float64(next(terms), index, next(terms), dim, abs(alpha))
    overflow = ~(magnitude * (1 + UNIT_ROUNDOFF[input.dtype] * (2 + len(index))) <= largest)
    assert torch.equal(result.isnan() & ~finite & ~overflow, exact.isnan() & ~overflow)
    infinite = exact.isinf() & ~overflow
    assert torch.equal(result[infinite].double(), exact[infinite])
    inside = finite & ~overflow
    error = (result.double() - exact).abs()
    worst = (error - limit)[inside]
    assert worst.numel() == 0 or bool((worst <= 0).all()), f"off by {float(error[inside].max()):.3g}"
    one_sign = finite & (exact.abs() == magnitude) & (exact.abs() - limit > largest)
    assert bool((result[one_sign].double() == exact[one_sign].sign() * float("inf")).all())


def bits_equal(first, second):
    """Whether two tensors are the same bit for bit, NaN payloads aside."""
    if first.dtype.is_floating_point:
        same_sign = torch.signbit(first) == torch.signbit(second)
        return bool((((first == second) & same_sign) | (first.isnan() & second.isnan())).all())
    return torch.equal(first, second)
