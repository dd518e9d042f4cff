"""torch.compile on CPU tensors: one graph, right results, gradients, dynamic K, and no copy of the destination in Inductor."""

import pytest
import torch
from conftest import BACKENDS, requires_compiler
from expecttest import assert_expected_inline
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend, normalize_gm
from torch._inductor.utils import run_and_get_code

import torch_neuron_scatter as tns

OPS = torch.ops.neuron
INDEX = torch.tensor([0, 0, 1, 2, 2, 2])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_cache():
        yield
    torch._dynamo.reset()


def direct(input, index, src):
    OPS.scatter_add_(input, 0, index, src)
    return input


def on_an_intermediate(input, index, src):
    return OPS.scatter_add_(input * 2, 0, index, src, alpha=3)


def on_a_view_of_an_intermediate(input, index, src):
    buffer = torch.zeros(8, input.shape[1])
    OPS.scatter_add_(buffer[2:6], 0, index, src)
    return buffer + 1


def on_a_view_of_the_graph_input(input, index, src):
    OPS.scatter_add_(input[1:], 0, index, src)
    return input


def out_of_place(input, index, src):
    return OPS.scatter_add(input, 0, index, src)


def routed_index_add_(input, index, src):
    return input.index_add_(0, index, src, alpha=2)


def routed_scatter_add_(input, index, src):
    return input.scatter_add_(0, index.unsqueeze(1).expand(-1, src.shape[1]), src)


DIRECT = [direct, on_an_intermediate, on_a_view_of_an_intermediate, out_of_place]
ROUTED = [routed_index_add_, routed_scatter_add_]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_problem_statement(backend):
    compiled = torch.compile(direct, backend=backend, fullgraph=True)
    assert compiled(torch.zeros(4, 1), INDEX, torch.ones(6, 1)).flatten().tolist() == [2, 1, 3, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", DIRECT + ROUTED, ids=lambda f: f.__name__)
def test_forward_and_backward_in_one_graph(backend, function):
    counter = CompileCounterWithBackend(backend)
    input, src = torch.randn(4, 3), torch.randn(6, 3)
    weight = torch.randn(8 if function is on_a_view_of_an_intermediate else 4, 3)

    def step(input, index, src):
        return (function(input * 1, index, src) * weight).sum()

    def gradients(step):
        leaves = input.clone().requires_grad_(), src.clone().requires_grad_()
        loss = step(leaves[0], INDEX, leaves[1])
        loss.backward()
        grad = leaves[0].grad if leaves[0].grad is not None else torch.zeros(4, 3)
        return loss.detach(), grad, leaves[1].grad

    expected = gradients(step)
    with tns.routing(devices=("cpu",)):
        got = gradients(torch.compile(step, backend=counter, fullgraph=True))
    for mine, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [direct, out_of_place, *ROUTED], ids=lambda f: f.__name__)
def test_dynamic_count_compiles_once(backend, function):
    counter = CompileCounterWithBackend(backend)
    with tns.routing(devices=("cpu",)):
        compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
        for count in (6, 9, 300, 2):
            input, index, src = torch.randn(5, 3), torch.randint(0, 5, (count,)), torch.randn(count, 3)
            expected = function(input.clone(), index, src)
            torch.testing.assert_close(compiled(input, index, src), expected)
    assert counter.frame_count == 1


def test_the_graph_holds_the_functionalised_op():
    backend = AotEagerAndRecordGraphs()
    with tns.routing(devices=("cpu",)):
        torch.compile(routed_index_add_, backend=backend, fullgraph=True)(torch.zeros(4, 1), INDEX, torch.ones(6, 1))
    assert_expected_inline(
        normalize_gm(backend.graphs[0].print_readable(False)),
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_input_: "f32[4, 1]", L_index_: "i64[6]", L_src_: "f32[6, 1]"):
        l_input_ = L_input_
        l_index_ = L_index_
        l_src_ = L_src_

        scatter_add__default: "f32[4, 1]" = torch.ops.neuron.scatter_add_.default(l_input_, 0, l_index_, l_src_, alpha = 2);  l_index_ = l_src_ = scatter_add__default = None
        return (l_input_,)
""",  # noqa: E501
    )
    assert_expected_inline(
        normalize_gm(backend.fw_graphs[0].print_readable(False)),
        """\
class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "f32[4, 1]", arg1_1: "i64[6]", arg2_1: "f32[6, 1]"):
        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.neuron.scatter_add_.default, dim = 0, index = arg1_1, src = arg2_1, alpha = 2, unique_indices = False, lnc = None, _input_base_index = 0, _all_bases = [arg0_1]);  arg1_1 = arg2_1 = None
        getitem_1: "f32[4, 1]" = auto_functionalized_v2[1];  auto_functionalized_v2 = None
        copy_: "f32[4, 1]" = torch.ops.aten.copy_.default(arg0_1, getitem_1);  arg0_1 = getitem_1 = None
        return (copy_,)
""",  # noqa: E501
    )


@requires_compiler
@pytest.mark.parametrize(
    "function",
    [direct, on_a_view_of_the_graph_input, on_an_intermediate, on_a_view_of_an_intermediate, routed_index_add_],
    ids=lambda f: f.__name__,
)
def test_inductor_writes_no_copy_of_the_destination(function):
    """What the wrapper allocates, by size: only tensors that the function itself makes, never a second destination."""
    input, src = torch.randn(4, 3), torch.randn(6, 3)
    with tns.routing(devices=("cpu",)):
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), input, INDEX, src)
    body = code[code.index("def call(") :]
    body = body[: body.index("return (")]
    assert body.count("torch.ops.neuron.scatter_add_.default(") == 1
    assert "torch.ops.neuron.scatter_add.default(" not in body
    made = {on_an_intermediate: 1, on_a_view_of_an_intermediate: 2}.get(function, 0)
    assert body.count("empty_strided_cpu(") == made
    assert sum(line.strip().startswith("cpp_fused") for line in body.splitlines()) == made


def with_a_copy_of_its_own_rows(input, index, src):
    doubled = input * 2
    return OPS.scatter_add_(doubled, 0, index[:2], doubled[:2].clone())


def with_a_copy_of_the_graph_inputs_rows(input, index, src):
    return OPS.scatter_add_(input, 0, index[:2], input.clone()[:2])


def with_indices_copied_from_itself(input, index, src):
    table = (input * 0).long()
    return OPS.scatter_add_(table[:, 0], 0, table[:2, 0].clone(), table[:2, 1].clone() + 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [with_a_copy_of_its_own_rows, with_a_copy_of_the_graph_inputs_rows, with_indices_copied_from_itself],
    ids=lambda f: f.__name__,
)
def test_an_operand_cloned_from_the_destination_keeps_its_values(backend, function):
    input, src = torch.arange(8.0).reshape(4, 2), torch.ones(6, 2)
    expected = function(input.clone(), INDEX, src)
    assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(input, INDEX, src), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("destination_needs_gradient", [False, True])
def test_gradients_flow_through_a_graph_input_that_was_written(backend, destination_needs_gradient):
    """The loss is of the destination itself, outside the graph that wrote it."""

    def write(input, index, src):
        OPS.scatter_add_(input, 0, index, src)
        return input * 2

    def gradients(write):
        leaf = torch.arange(8.0).reshape(4, 2).requires_grad_(destination_needs_gradient)
        src = torch.ones(6, 2, requires_grad=True)
        input = leaf * 3
        doubled = write(input, INDEX, src)
        (doubled.sum() + (input**2).sum()).backward()
        return src.grad, leaf.grad if destination_needs_gradient else torch.zeros(0), input.detach()

    expected = gradients(write)
    got = gradients(torch.compile(write, backend=backend, fullgraph=True))
    assert all(torch.equal(mine, eager) for mine, eager in zip(got, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_func_transforms_inside_a_graph(backend):
    index, input, src = INDEX, torch.randn(4, 3), torch.randn(6, 3)

    def call(op, src):
        return op(input, 0, index, src).sin()

    def transforms(op):
        def function(src):
            gradient = torch.func.grad(lambda src: call(op, src).sum())(src)
            _, tangent = torch.func.jvp(lambda src: call(op, src), (src,), (torch.ones_like(src),))
            batched = torch.func.vmap(lambda src: call(op, src))(torch.stack([src, src * 2]))
            return gradient, tangent, batched

        return function

    got = torch.compile(transforms(OPS.scatter_add), backend=backend, fullgraph=True)(src)
    for mine, torchs in zip(got, transforms(torch.index_add)(src), strict=True):
        torch.testing.assert_close(mine, torchs)


@requires_compiler
def test_routing_taken_away_after_compiling():
    compiled = torch.compile(routed_index_add_, backend="inductor", fullgraph=True)
    expected = torch.zeros(4, 1).index_add_(0, INDEX, torch.ones(6, 1), alpha=2)
    with tns.routing(devices=("cpu",)):
        assert torch.equal(compiled(torch.zeros(4, 1), INDEX, torch.ones(6, 1)), expected)
    assert torch.equal(compiled(torch.zeros(4, 1), INDEX, torch.ones(6, 1)), expected)


def test_a_bad_shape_is_refused_while_tracing():
    with pytest.raises(Exception, match="index has 6 elements"):
        torch.compile(direct, backend="aot_eager", fullgraph=True)(torch.zeros(4, 1), INDEX, torch.ones(5, 1))


@requires_compiler
def test_a_bad_index_is_refused_when_compiled_code_runs():
    input = torch.zeros(4, 1)
    with pytest.raises(IndexError, match=r"index\[5\] is 4"):
        torch.compile(direct, fullgraph=True)(input, torch.tensor([0, 0, 1, 2, 2, 4]), torch.ones(6, 1))
    assert not input.any()


def test_count_from_data_needs_no_guard():
    """index from nonzero(): K is unbacked, and neither op may guard on it."""

    def function(input, mask, src):
        index = mask.nonzero().squeeze(1)
        return OPS.scatter_add(input, 0, index, src[: index.shape[0]] * 1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for mask in (torch.tensor([True, False, True, True]), torch.tensor([False, False, True, False])):
            torch.testing.assert_close(
                compiled(torch.zeros(4, 2), mask, torch.ones(4, 2)), function(torch.zeros(4, 2), mask, torch.ones(4, 2))
            )


def test_compiled_on_device_neuron_with_backend_eager(neuron):
    compiled = torch.compile(direct, backend="eager", fullgraph=True)
    input = torch.zeros(4, 1, device=neuron)
    assert compiled(input, INDEX.to(neuron), torch.ones(6, 1, device=neuron)).flatten().tolist() == [2, 1, 3, 0]
    assert tns.stats() == {"kernel": 1, "fallback": 0}
