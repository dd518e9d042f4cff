"""torch.compile(backend="neuron"): what its graphs hold, forward and backward, and that they compute what eager does."""

import collections
import re

import pytest
import torch
from conftest import requires_neuron
from expecttest import assert_expected_inline
from moe import MixtureOfExperts
from torch._dynamo.testing import AotEagerAndRecordGraphs, normalize_gm
from torch._dynamo.utils import counters
from torch.nn.functional import embedding

import torch_neuron_scatter as tns

pytestmark = [requires_neuron, pytest.mark.usefixtures("fresh_dynamo")]

OPS = torch.ops.neuron
KERNEL_NODE = "nki_kernel_wrapper"


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that the backend was given to lower, in the order of compilation."""
    executor = pytest.importorskip("torch_neuronx.neuron_dynamo_backend.executor", reason="not the stand-in's backend")
    captured = []
    compile_graph = executor.compile_graph

    def record(gm, example_inputs):
        captured.append(gm)
        return compile_graph(gm, example_inputs)

    monkeypatch.setattr(executor, "compile_graph", record)
    return captured


def targets(gm):
    return collections.Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def kernel_nodes(gm):
    return targets(gm)[KERNEL_NODE]


def assert_only_kernel_nodes(gm, scatters):
    """One kernel node a scatter, and nothing of what the backend would make of torch's own operators."""
    names = targets(gm)
    assert names[KERNEL_NODE] == scatters
    refused = ("index_add", "index_put", "one_hot", "scatter_add", "neuron.", "clone", "select_scatter", "as_strided")
    assert [name for name in names if any(word in name for word in refused)] == []
    destinations = [node.kwargs["args"][0] for node in gm.graph.nodes if str(node.target) == KERNEL_NODE]
    assert [str(node.target) for node in destinations if "copy" in str(node.target)] == []


def compiled(function, **options):
    return torch.compile(function, backend="neuron", fullgraph=True, **options)


def numbers(*values):
    return torch.tensor(values, device="neuron")


INDEX = (0, 0, 1, 2, 2, 2)


def golden(gm):
    """The graph's code, without the numbers that depend on what the process traced before."""
    code = normalize_gm(gm.print_readable(False)).strip()
    return re.sub(r"\b(kernel_idx|constant_args_key) = -?\d+", r"\1 = n", code) + "\n"


def test_graph_of_the_operator_on_a_graph_input(graphs):
    input = torch.zeros(4, 2, device="neuron")
    function = compiled(lambda input, index, src: OPS.scatter_add_(input, 0, index, src))
    assert function(input, numbers(*INDEX).int(), torch.ones(6, 2, device="neuron")) is input
    assert input[:, 0].tolist() == [2, 1, 3, 0]
    assert_expected_inline(
        golden(graphs[0]),
        """\
class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "f32[4, 2]", arg1_1: "i32[6]", arg2_1: "f32[6, 2]"):
        stationary_scatter_add_proxy: "f32[4, 2]" = torch.ops.higher_order.nki_kernel_wrapper(kernel_idx = n, grid = (2,), backend_config = 'stationary_scatter_add(alpha=None, unique_indices=False, tiles_per_group=8)', operand_output_aliases = {0: 0}, args = (arg0_1, arg1_1, arg2_1), arg_names = ('input', 'index', 'src'), constant_args_key = n);  arg1_1 = arg2_1 = None
        copy_: "f32[4, 2]" = torch.ops.aten.copy_.default(arg0_1, stationary_scatter_add_proxy);  arg0_1 = stationary_scatter_add_proxy = None
        return (copy_,)
""",  # noqa: E501
    )
    assert_only_kernel_nodes(graphs[0], 1)


def calls(gm):
    """The graph's operators in order, one a line."""
    return "\n".join(str(node.target) for node in gm.graph.nodes if node.op == "call_function") + "\n"


def test_graphs_of_the_operator_with_gradients(graphs):
    input, src = (torch.ones(rows, 2, device="neuron", requires_grad=True) for rows in (4, 6))
    function = compiled(lambda input, index, src: OPS.scatter_add_(input * 2, 0, index, src, alpha=3))
    function(input, numbers(*INDEX), src).backward(torch.ones(4, 2, device="neuron"))
    assert input.grad[:, 0].tolist() == [2] * 4 and src.grad[:, 0].tolist() == [3] * 6
    assert_expected_inline(
        calls(graphs[0]),
        """\
aten.mul.Tensor
aten.full.default
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
""",
    )
    assert_expected_inline(
        calls(graphs[1]),
        """\
aten.index_select.default
aten.mul.Tensor
aten.mul.Tensor
""",
    )


def test_graphs_of_routed_calls_with_gradients(graphs):
    def function(input, index, src):
        added = (input * 2).index_add_(0, index, src)
        return added.scatter_add_(0, index.unsqueeze(1).expand(-1, 2), src * src)

    input, src = (torch.ones(rows, 2, device="neuron", requires_grad=True) for rows in (4, 6))
    with tns.routing():
        compiled(function)(input, numbers(*INDEX), src).backward(torch.ones(4, 2, device="neuron"))
    assert input.grad[:, 0].tolist() == [2] * 4 and src.grad[:, 0].tolist() == [3] * 6
    assert_expected_inline(
        calls(graphs[0]),
        """\
aten.mul.Tensor
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
aten.unsqueeze.default
aten.expand.default
aten.mul.Tensor
aten.select.int
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
""",
    )
    assert_expected_inline(
        calls(graphs[1]),
        """\
aten.index_select.default
aten.mul.Tensor
aten.mul.Tensor
aten.add.Tensor
aten.index_select.default
aten.add.Tensor
aten.mul.Tensor
""",
    )
    assert_only_kernel_nodes(graphs[0], 2)


def test_graph_of_routed_index_add_(graphs):
    def function(index, src):
        return torch.zeros(4, 2, device="neuron").index_add_(0, index, src, alpha=2) * 3

    with tns.routing():
        result = compiled(function)(numbers(*INDEX), torch.ones(6, 2, device="neuron"))
    assert result[:, 0].tolist() == [12, 6, 18, 0]
    assert_expected_inline(
        golden(graphs[0]),
        """\
class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "i64[6]", arg1_1: "f32[6, 2]"):
        zeros: "f32[4, 2]" = torch.ops.aten.zeros.default([4, 2], device = device(type='neuron'), pin_memory = False)

        full: "f32[1]" = torch.ops.aten.full.default([1], 2, dtype = torch.float32, device = device(type='neuron', index=0), pin_memory = False)
        clamp: "i64[6]" = torch.ops.aten.clamp.default(arg0_1, -1, 4);  arg0_1 = None
        _to_copy: "i32[6]" = torch.ops.aten._to_copy.default(clamp, dtype = torch.int32);  clamp = None
        stationary_scatter_add_proxy: "f32[4, 2]" = torch.ops.higher_order.nki_kernel_wrapper(kernel_idx = n, grid = (2,), backend_config = 'stationary_scatter_add(unique_indices=False, tiles_per_group=8)', operand_output_aliases = {0: 0}, args = (zeros, _to_copy, arg1_1, full), arg_names = ('input', 'index', 'src', 'alpha'), constant_args_key = n);  zeros = _to_copy = arg1_1 = full = None

        mul: "f32[4, 2]" = torch.ops.aten.mul.Tensor(stationary_scatter_add_proxy, 3);  stationary_scatter_add_proxy = None
        return (mul,)
""",  # noqa: E501
    )
    assert_only_kernel_nodes(graphs[0], 1)


def test_graph_of_routed_row_expanded_scatter_add_(graphs):
    def function(index, src):
        return torch.zeros(4, 2, device="neuron").scatter_add_(0, index.unsqueeze(1).expand(-1, 2), src)

    with tns.routing():
        result = compiled(function)(numbers(*INDEX), torch.ones(6, 2, device="neuron"))
    assert result[:, 0].tolist() == [2, 1, 3, 0]
    assert_expected_inline(
        golden(graphs[0]),
        """\
class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "i64[6]", arg1_1: "f32[6, 2]"):
        zeros: "f32[4, 2]" = torch.ops.aten.zeros.default([4, 2], device = device(type='neuron'), pin_memory = False)
        unsqueeze: "i64[6, 1]" = torch.ops.aten.unsqueeze.default(arg0_1, 1);  arg0_1 = None
        expand: "i64[6, 2]" = torch.ops.aten.expand.default(unsqueeze, [-1, 2]);  unsqueeze = None

        select: "i64[6]" = torch.ops.aten.select.int(expand, 1, 0);  expand = None
        clamp: "i64[6]" = torch.ops.aten.clamp.default(select, -1, 4);  select = None
        _to_copy: "i32[6]" = torch.ops.aten._to_copy.default(clamp, dtype = torch.int32);  clamp = None
        stationary_scatter_add_proxy: "f32[4, 2]" = torch.ops.higher_order.nki_kernel_wrapper(kernel_idx = n, grid = (2,), backend_config = 'stationary_scatter_add(alpha=None, unique_indices=False, tiles_per_group=8)', operand_output_aliases = {0: 0}, args = (zeros, _to_copy, arg1_1), arg_names = ('input', 'index', 'src'), constant_args_key = n);  zeros = _to_copy = arg1_1 = None
        return (stationary_scatter_add_proxy,)
""",  # noqa: E501
    )
    assert_only_kernel_nodes(graphs[0], 1)


def test_graphs_of_an_embedding(graphs):
    weight = torch.ones(5, 2, device="neuron", requires_grad=True)
    with tns.routing():
        compiled(lambda index, weight: (embedding(index, weight) ** 2).sum())(numbers(*INDEX), weight).backward()
    assert weight.grad[:, 0].tolist() == [4, 2, 6, 0, 0]
    assert_expected_inline(
        golden(graphs[1]),
        """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "i64[6]", embedding: "f32[6, 2]", tangents_1: "f32[]"):
        expand: "f32[6, 2]" = torch.ops.aten.expand.default(tangents_1, [6, 2]);  tangents_1 = None
        pow_2: "f32[6, 2]" = torch.ops.aten.pow.Tensor_Scalar(embedding, 1.0);  embedding = None
        mul: "f32[6, 2]" = torch.ops.aten.mul.Scalar(pow_2, 2.0);  pow_2 = None
        mul_1: "f32[6, 2]" = torch.ops.aten.mul.Tensor(expand, mul);  expand = mul = None
        view: "i64[6]" = torch.ops.aten.view.default(primals_1, [-1]);  primals_1 = None
        view_1: "f32[6, 2]" = torch.ops.aten.view.default(mul_1, [6, 2]);  mul_1 = None
        zeros: "f32[5, 2]" = torch.ops.aten.zeros.default([5, 2], dtype = torch.float32, device = device(type='neuron', index=0), pin_memory = False)
        clamp: "i64[6]" = torch.ops.aten.clamp.default(view, -1, 5);  view = None
        _to_copy: "i32[6]" = torch.ops.aten._to_copy.default(clamp, dtype = torch.int32);  clamp = None
        stationary_scatter_add_proxy: "f32[5, 2]" = torch.ops.higher_order.nki_kernel_wrapper(kernel_idx = n, grid = (2,), backend_config = 'stationary_scatter_add(alpha=None, unique_indices=False, tiles_per_group=8)', operand_output_aliases = {0: 0}, args = (zeros, _to_copy, view_1), arg_names = ('input', 'index', 'src'), constant_args_key = n);  zeros = _to_copy = view_1 = None
        return (None, stationary_scatter_add_proxy)
""",  # noqa: E501
    )
    assert_only_kernel_nodes(graphs[0], 0)
    assert_only_kernel_nodes(graphs[1], 1)


def test_without_routing_the_one_hot_and_the_index_put_show(graphs):
    """What the checks above look for is there when nothing prevents it."""
    weight = torch.ones(5, 2, device="neuron", requires_grad=True)
    compiled(lambda index, weight: embedding(index, weight).sum())(numbers(*INDEX), weight).backward()
    compiled(lambda input, index, src: input.index_add_(0, index, src))(
        torch.zeros(4, 2, device="neuron"), numbers(*INDEX), torch.ones(6, 2, device="neuron")
    )
    assert targets(graphs[1])["aten.mm.default"] == 1 and kernel_nodes(graphs[1]) == 0
    assert targets(graphs[2])["aten.index_put.default"] == 1 and kernel_nodes(graphs[2]) == 0


def test_a_mixture_of_experts_layer_is_one_kernel_node_a_scatter(graphs):
    torch.manual_seed(0)
    model = MixtureOfExperts(hidden=8, inner=16).to("neuron")
    tokens = torch.randn(12, 8).to("neuron")

    def gradients(model_call):
        model.zero_grad()
        leaf = tokens.clone().requires_grad_()
        (model_call(leaf) ** 2).sum().backward()
        return [leaf.grad.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]

    with tns.routing():
        expected = gradients(model)
        assert tns.stats() == {"kernel": 4, "fallback": 0}
        got = gradients(compiled(model))
    assert all(torch.equal(mine, eager) for mine, eager in zip(got, expected, strict=True))
    forward, backward = graphs
    assert_only_kernel_nodes(forward, 2)
    assert_only_kernel_nodes(backward, 2)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert_expected_inline(
        calls(forward),
        """\
aten.t.default
aten.mm.default
aten._softmax.default
aten.detach.default
aten.topk.default
<built-in function getitem>
<built-in function getitem>
aten.sum.dim_IntList
aten.div.Tensor
aten.view.default
aten.arange.default
aten.eq.Tensor
aten._to_copy.default
aten.cumsum.default
aten.sub.Tensor
aten.mul.Tensor
aten.sum.dim_IntList
aten._to_copy.default
aten.view.default
aten.mul.Tensor
aten.add.Tensor
aten.lt.Scalar
aten.scalar_tensor.default
aten.where.self
aten.view.default
aten.arange.default
aten.floor_divide.default
aten.new_zeros.default
aten.index_select.default
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
aten.slice.Tensor
aten.view.default
aten.bmm.default
aten.silu.default
aten.bmm.default
aten.view.default
aten.new_zeros.default
aten.cat.default
aten.zeros_like.default
aten.index_select.default
aten.mul.Tensor
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
""",
    )
    assert_expected_inline(
        calls(backward),
        """\
aten.index_select.default
aten.mul.Tensor
aten.mul.Tensor
aten.sum.dim_IntList
aten.new_zeros.default
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
aten.slice.Tensor
aten.view.default
aten.transpose.int
aten.bmm.default
aten.transpose.int
aten.bmm.default
aten.sigmoid.default
aten.empty_like.default
aten.fill.Scalar
aten.sub.Tensor
aten.mul.Tensor
aten.add.Scalar
aten.mul.Tensor
aten.mul.Tensor
aten.slice.Tensor
aten.view.default
aten.transpose.int
aten.bmm.default
aten.transpose.int
aten.bmm.default
aten.view.default
aten.slice_backward.default
aten.index_select.default
aten.new_zeros.default
aten.clamp.default
aten._to_copy.default
nki_kernel_wrapper
aten.view.default
aten.div.Tensor
aten.div.Tensor
aten.neg.default
aten.mul.Tensor
aten.div.Tensor
aten.sum.dim_IntList
aten.expand.default
aten.add.Tensor
aten.new_zeros.default
aten.scatter.src
aten.detach.default
aten._softmax_backward_data.default
aten.t.default
aten.mm.default
aten.t.default
aten.t.default
aten.mm.default
aten.add.Tensor
aten.t.default
""",
    )


READS = {
    "embedding": lambda table, index: embedding(index, table),
    "embedding_padding": lambda table, index: embedding(index, table, padding_idx=2),
    "embedding_by_frequency": lambda table, index: embedding(index, table, scale_grad_by_freq=True),
    "index_select": lambda table, index: table.index_select(0, index),
    "gather": lambda table, index: table.gather(0, index.unsqueeze(1).expand(-1, table.shape[1])),
    "indexing": lambda table, index: table[index],
    "indexing_from_the_end": lambda table, index: table[index - table.shape[0]],
    "indexing_by_a_matrix": lambda table, index: table[index.reshape(2, 3)].reshape(6, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("read", READS)
def test_the_backward_of_a_read_is_the_kernel_eagerly_and_in_graphs(graphs, read, dtype):
    torch.manual_seed(0)
    # Multiples of the counts 1, 2 and 3: every sum and quotient is exact in every dtype.
    table, weight = torch.randn(5, 3, dtype=dtype), 6 * torch.randint(-8, 8, (6, 3)).to(dtype)

    def gradient(call, device):
        leaf = table.detach().clone().to(device).requires_grad_()
        call(leaf, torch.tensor(INDEX, device=device), weight.to(device)).backward()
        return leaf.grad.cpu()

    def loss(table, index, weight):
        return (READS[read](table, index) * weight).sum()

    expected = gradient(loss, "cpu")
    with tns.routing():
        eager = gradient(loss, "neuron")
        launches = 2 if read == "embedding_by_frequency" else 1
        assert tns.stats() == {"kernel": launches, "fallback": 0}
        in_graph = gradient(compiled(loss), "neuron")
    assert torch.equal(eager, expected)
    assert torch.equal(in_graph, expected)
    assert_only_kernel_nodes(graphs[1], launches)


def test_a_read_by_a_mask_or_by_two_indices_goes_back_to_torch_and_is_counted():
    def gradient(read, device):
        leaf = torch.ones(5, 3, device=device, requires_grad=True)
        read(leaf).sum().backward()
        return leaf.grad.cpu()

    for read in (lambda t: t[t[:, 0] > 0], lambda t: t[[0, 1, 1], [0, 2, 2]], lambda t: t[:, [0, 1, 1]]):
        expected = gradient(read, "cpu")
        with tns.routing():
            tns.reset_stats()
            assert torch.equal(gradient(read, "neuron"), expected)
            assert tns.stats()["fallback"] == 1 and tns.stats()["kernel"] == 0


NOT_SERVED = {
    "columns": lambda table, index: table.t().index_select(1, index).t(),
    "columns_by_indexing": lambda table, index: table[:, index % 3].sum(1, keepdim=True),
    "two_indices": lambda table, index: table[index, index % 3].unsqueeze(1),
    "one_element_at_a_time": lambda table, index: table.gather(0, (index.unsqueeze(1) + table.new_zeros(3).long())),
    "doubles": lambda table, index: table.double().index_select(0, index),
}


@pytest.mark.parametrize("read", NOT_SERVED)
def test_what_no_kernel_serves_stays_in_the_graph_as_torchs(graphs, read):
    def gradient(call, device):
        leaf = torch.arange(15.0).reshape(5, 3).to(device).requires_grad_()
        call(leaf, torch.tensor(INDEX, device=device)).backward()
        return leaf.grad.cpu()

    def loss(table, index):
        return (NOT_SERVED[read](table, index) ** 2).sum()

    expected = gradient(loss, "cpu")
    with tns.routing():
        assert torch.equal(gradient(compiled(loss), "neuron"), expected)
    assert kernel_nodes(graphs[1]) == 0


def test_a_write_that_does_not_accumulate_is_no_business_of_routing():
    table = torch.zeros(5, 3, device="neuron")
    with tns.routing():
        table[numbers(1, 2)] = 1.0
    assert table[:, 0].tolist() == [0, 1, 1, 0, 0] and tns.stats() == {"kernel": 0, "fallback": 0}


def test_other_backends_keep_the_operator():
    backend = AotEagerAndRecordGraphs()
    input = torch.zeros(4, 2, device="neuron")
    function = torch.compile(lambda input, index, src: OPS.scatter_add_(input, 0, index, src), backend=backend)
    function(input, numbers(*INDEX), torch.ones(6, 2, device="neuron"))
    assert input[:, 0].tolist() == [2, 1, 3, 0]
    names = targets(backend.fw_graphs[0])
    assert names["auto_functionalized_v2"] == 1 and names[KERNEL_NODE] == 0


def test_an_operator_that_the_backend_cannot_lower_is_refused_by_name():
    with torch.library._scoped_library("tns_test", "FRAGMENT") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("tns_test::opaque", lambda x: x.clone(), lib=library)
        with pytest.raises(Exception, match=r"cannot lower node opaque, a call of tns_test\.opaque"):
            compiled(torch.ops.tns_test.opaque)(torch.zeros(2, device="neuron"))


def on_a_view(input, index, src):
    OPS.scatter_add_(input[1:], 0, index, src)
    return input + 1


def on_a_transposed_view(input, index, src):
    OPS.scatter_add_(input.t(), 1, index, src.t(), alpha=2)
    return input + 1


def with_the_old_value_read_later(input, index, src):
    doubled = input * 2
    first, second = OPS.scatter_add(doubled, 0, index, src), OPS.scatter_add(doubled, 0, index, src * 2)
    return first, second, doubled, OPS.scatter_add(input, 0, index, src), input + 0


def with_equal_zeros(input, index, src):
    """Two destinations that common subexpression elimination makes one node."""
    first, second = torch.zeros_like(input), torch.zeros_like(input)
    return OPS.scatter_add_(first, 0, index, src), OPS.scatter_add_(second, 0, index, src * 2)


def written_twice(input, index, src):
    OPS.scatter_add_(input, 0, index, src)
    kept = input * 1
    OPS.scatter_add_(input, 0, index, src)
    return kept, input


def with_src_from_itself(input, index, src):
    return OPS.scatter_add_(input, 0, index[:2], input.clone()[:2])


def of_one_dimension(input, index, src):
    return OPS.scatter_add_(input[:, 0], 0, index, src[:, 0])


def of_integers(input, index, src):
    return OPS.scatter_add_(input.long(), 0, index, src.long(), alpha=3)


def of_columns(input, index, src):
    return OPS.scatter_add_(input * 1, 1, index[:2] % 2, input[:, :2], alpha=0.5)


def of_a_narrower_src(input, index, src):
    return OPS.scatter_add_(input, 0, index, src.bfloat16(), lnc=1, unique_indices=False)


def of_nothing(input, index, src):
    return OPS.scatter_add_(input, 0, index[:0], src[:0])


FUNCTIONS = [
    on_a_view,
    on_a_transposed_view,
    with_the_old_value_read_later,
    with_equal_zeros,
    written_twice,
    with_src_from_itself,
    of_one_dimension,
    of_integers,
    of_columns,
    of_a_narrower_src,
    of_nothing,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_graph_leaves_what_eager_leaves(function):
    torch.manual_seed(0)
    input, src = torch.randn(5, 3), torch.randn(6, 3)

    def outcome(call):
        destination = input.to("neuron")
        results = call(destination, numbers(*INDEX), src.to("neuron"))
        results = results if isinstance(results, tuple) else (results,)
        return [destination.cpu(), *(result.cpu() for result in results)]

    expected, got = outcome(function), outcome(compiled(function))
    assert all(torch.equal(mine, eager) for mine, eager in zip(got, expected, strict=True))


@pytest.mark.parametrize("destination_needs_gradient", [False, True])
def test_gradients_flow_through_a_graph_input_that_was_written(destination_needs_gradient):
    def write(input, index, src):
        OPS.scatter_add_(input, 0, index, src)
        return input * 2

    def gradients(write):
        leaf = torch.ones(4, 2, device="neuron", requires_grad=destination_needs_gradient)
        src = torch.ones(6, 2, device="neuron", requires_grad=True)
        input = leaf * 3
        doubled = write(input, numbers(*INDEX), src)
        (doubled.sum() + (input**2).sum()).backward()
        return src.grad.cpu(), leaf.grad.cpu() if destination_needs_gradient else torch.zeros(0), input.detach().cpu()

    assert all(torch.equal(*pair) for pair in zip(gradients(compiled(write)), gradients(write), strict=True))


def test_a_bad_index_is_refused_when_the_graph_runs():
    input = torch.zeros(4, 2, device="neuron")
    function = compiled(lambda input, index, src: OPS.scatter_add_(input, 0, index, src))
    for bad in (4, -1, 2**32):
        with pytest.raises(IndexError):
            function(input, numbers(0, 0, 1, 2, 2, bad), torch.ones(6, 2, device="neuron"))
    assert not input.cpu().any()


def test_the_backward_of_an_embedding_holds_no_more_than_the_gradient_and_the_table():
    """Bytes allocated on the device above what was there before: simulated device, counted by its allocator."""
    count, rows, columns = 8192, 32000, 64
    needed = (count * columns + rows * columns) * 4
    index = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(0)).to("neuron")
    weight = torch.zeros(rows, columns, device="neuron", requires_grad=True)

    def peak():
        loss = compiled(lambda weight, index: embedding(index, weight).sum())(weight, index)
        before = torch.neuron.memory_allocated()
        torch.neuron.reset_peak_memory_stats()
        loss.backward()
        weight.grad = None
        return torch.neuron.max_memory_allocated() - before

    with tns.routing():
        assert peak() <= 1.2 * needed
    torch._dynamo.reset()
    # The one-hot matrix alone, of int64.
    assert peak() >= count * rows * 8
