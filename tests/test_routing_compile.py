"""Routing and torch.compile: what compiled code does when routing changes, and calls that are traced through the patches."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS, requires_neuron
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs

import torch_neuron_scatter as tns

ROOT = Path(tns.__file__).parents[1]
INDEX = torch.tensor([0, 0, 1])
SRC = torch.ones(3, 2)
ON = {"devices": ("cpu",)}

CALLS = {
    "method": lambda x, i, s: x.index_add_(0, i, s),
    "out_of_place_method": lambda x, i, s: x.index_add(0, i, s),
    "unbound_method": lambda x, i, s: torch.Tensor.index_add_(x, 0, i, s),
    "function": lambda x, i, s: torch.index_add(x, 0, i, s),
    "keywords": lambda x, i, s: torch.index_add(input=x, dim=0, index=i, source=s, out=None),
    "scatter_method": lambda x, i, s: x.scatter_add_(0, i.unsqueeze(1).expand_as(s), s),
    "scatter_function": lambda x, i, s: torch.scatter_add(x, 0, i.unsqueeze(1).expand_as(s), s),
    "part": lambda x, i, s: x.scatter_add(0, i.unsqueeze(1), s),
    "part_in_place": lambda x, i, s: x.scatter_add_(0, i.unsqueeze(1), s),
    "nothing": lambda x, i, s: x.scatter_add_(0, i[:0].unsqueeze(1).expand(-1, 2), s),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    # The first change of routing in a process drops compiled code; tests that count want it behind them.
    with tns.routing():
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operators(graph):
    """Whether the operator is in a captured graph, and whether one of torch's own is."""
    called = [str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    ours = [name for name in called if name.startswith("neuron.")]
    torchs = [name for name in called if name not in ours and ("index_add" in name or "scatter_add" in name)]
    return bool(ours), bool(torchs)


@pytest.mark.parametrize(
    "states", [(False, True, False, True), (True, False, True, False)], ids=["off_first", "on_first"]
)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_is_never_stale(name, states):
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(CALLS[name], backend=backend, fullgraph=True)
    runs = []
    for state in states:
        with tns.routing(state, **ON):
            expected = CALLS[name](torch.zeros(4, 2), INDEX, SRC)
            before = len(backend.graphs)
            assert torch.equal(compiled(torch.zeros(4, 2), INDEX, SRC), expected)
            runs.append(len(backend.graphs) - before)
    assert runs == [1, 1, 0, 0], "compiled once for each state"
    assert [operators(graph) for graph in backend.graphs] == [(state, not state) for state in states[:2]]


PROGRAM = """
import torch, torch_neuron_scatter as tns

ran = []
def backend(graph, inputs):
    name = next(str(n.target) for n in graph.graph.nodes if "_add" in str(n.target))
    return lambda *args: (ran.append(name.startswith("neuron.")), graph.forward(*args))[1]

def call(function):
    torch.compile(function, backend=backend, fullgraph=True)(
        torch.zeros(4, 2), torch.tensor([0, 0, 1]), torch.ones(3, 2))

functions = [lambda x, i, s: x.index_add_(0, i, s), lambda x, i, s: torch.index_add(x, 0, i, s)]
def per_element(x, i, s):
    return x.scatter_add_(0, torch.stack([i, i], 1), s)
"""


def run_alone(program):
    """Each in a process of its own, since the first change of routing happens once."""
    subprocess.run([sys.executable, "-c", PROGRAM + program], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "between", ["pass", "with tns.routing(False): pass", "with tns.routing(devices=('meta',)): pass"]
)
def test_code_compiled_before_routing_was_ever_on_is_not_stale(between):
    run_alone(f"""
for function in functions: call(function)
{between}
for function in functions: call(function)
tns.enable(devices=("cpu",))
for function in functions: call(function)
tns.disable()
for function in functions: call(function)
assert ran == [False] * 4 + [True] * 2 + [False] * 2, ran
""")


def test_dynamo_first_used_while_routing_is_on():
    """What Dynamo remembers of torch's functions must not be our patches."""
    run_alone("""
tns.enable(devices=("cpu",))
for function in (*functions, per_element): call(function)
tns.disable()
for function in (*functions, per_element): call(function)
assert ran == [True, True, False, False, False, False], ran
""")


def test_a_scope_a_step_compiles_once():
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(CALLS["method"], backend=counter, fullgraph=True)
    for _ in range(12):
        with tns.routing(**ON):
            compiled(torch.zeros(4, 2), INDEX, SRC)
    assert counter.frame_count == 1


def test_devices_routed_are_guarded_too():
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(CALLS["method"], backend=backend, fullgraph=True)
    for devices in (("neuron",), ("cpu",)):
        with tns.routing(devices=devices):
            compiled(torch.zeros(4, 2), INDEX, SRC)
    assert [operators(graph) for graph in backend.graphs] == [(False, True), (True, False)]


def test_a_scope_inside_a_compiled_function_breaks_the_graph_and_is_right():
    def function(x, i, s):
        with tns.routing(**ON):
            return x.index_add_(0, i, s)

    assert torch.compile(function, backend="eager")(torch.zeros(4, 2), INDEX, SRC)[0].tolist() == [2, 2]
    assert not tns.is_enabled()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(4, 2), INDEX, SRC)
    assert not tns.is_enabled()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_operator_does_not_serve_stays_in_one_graph(backend):
    def function(x, i, s):
        return x.scatter_add(0, torch.stack([i, i.flip(0)], 1), s).index_add(1, i[:2], s.new_ones(4, 2))

    expected = function(torch.zeros(4, 2), INDEX, SRC)
    with tns.routing(**ON):
        got = torch.compile(function, backend=backend, fullgraph=True)(torch.zeros(4, 2), INDEX, SRC)
    assert torch.equal(got, expected)
    if backend != "eager":
        assert tns.stats() == {"kernel": 0, "fallback": 0}, "a graph of aten operators counts nothing"


@pytest.mark.parametrize("name,fullgraph", [("function", True), ("out_of_place_method", False)])
def test_a_subclass_inside_a_compiled_function_goes_to_torch(name, fullgraph):
    """Dynamo breaks the graph at a method of a subclass where Tensor's own is a Python function, as a patch is."""

    class Plain(torch.Tensor):
        pass

    backend = EagerAndRecordGraphs()
    with tns.routing(**ON):
        compiled = torch.compile(CALLS[name], backend=backend, fullgraph=fullgraph)
        result = compiled(torch.zeros(4, 2).as_subclass(Plain), INDEX, SRC)
    assert type(result) is Plain and result[0].tolist() == [2, 2]
    assert not any(operators(graph)[0] for graph in backend.graphs)


@pytest.mark.parametrize("strict", [True, False])
def test_export_holds_the_operator(strict):
    class Model(torch.nn.Module):
        def forward(self, x, i, s):
            return x.index_add(0, i, s)

    with tns.routing(**ON):
        program = torch.export.export(Model(), (torch.zeros(4, 2), INDEX, SRC), strict=strict)
    assert operators(program.graph_module) == (True, False)
    assert program.module()(torch.zeros(4, 2), INDEX, SRC)[0].tolist() == [2, 2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["index_add_", "scatter_add_"])
def test_count_from_data_stays_in_one_graph(form, backend):
    """An expert's tokens, as Mixture-of-Experts layers pick them: K comes from nonzero()."""

    def function(x, mask, s):
        index = mask.nonzero().squeeze(1)
        rows = s[index] * 2
        if form == "index_add_":
            return x.index_add_(0, index, rows)
        return x.scatter_add_(0, index.unsqueeze(1).expand(-1, 2), rows)

    graphs = EagerAndRecordGraphs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), tns.routing(**ON):
        compiled = torch.compile(function, backend=graphs if backend == "eager" else backend, fullgraph=True)
        for mask in ([True, False, True, True], [False, False, True, False], [False] * 4):
            mask = torch.tensor(mask)
            expected = function(torch.zeros(4, 2), mask, torch.ones(4, 2))
            assert torch.equal(compiled(torch.zeros(4, 2), mask, torch.ones(4, 2)), expected)
    if backend == "eager":
        assert [operators(graph) for graph in graphs.graphs] == [(True, False)]


def test_compiled_under_a_default_device():
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(CALLS["method"], backend=backend, fullgraph=True)
    with tns.routing(**ON), torch.device("cpu"):
        assert compiled(torch.zeros(4, 2), INDEX, SRC)[0].tolist() == [2, 2]
    assert operators(backend.graphs[0]) == (True, False)


def on_a_tensor_made_in_the_graph(input, index, src):
    return (input * 2).index_add_(0, index, src)


@pytest.mark.parametrize("first", [True, False])
def test_a_call_on_a_tensor_made_in_the_graph_is_routed_by_dynamo(first):
    """Not only when the graph is traced further: caches of compiled graphs are keyed by what Dynamo captured."""
    for enabled in (first, not first, first):
        torch._dynamo.reset()
        backend = EagerAndRecordGraphs()
        with tns.routing(enabled, devices=("cpu",)):
            torch.compile(on_a_tensor_made_in_the_graph, backend=backend, fullgraph=True)(
                torch.ones(4, 2), torch.tensor([0, 0, 1]), torch.ones(3, 2)
            )
        assert ("torch.ops.neuron.scatter_add_" in backend.graphs[0].code) == enabled


class Read(torch.autograd.Function):
    """A read of rows whose author wrote its backward by hand, as many models do."""

    @staticmethod
    def forward(ctx, table, index, by_scatter):
        ctx.save_for_backward(index)
        ctx.shape, ctx.by_scatter = table.shape, by_scatter
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        table = torch.zeros(ctx.shape, device=grad.device)
        if ctx.by_scatter:
            return table.scatter_add_(0, index.unsqueeze(1).expand(-1, ctx.shape[1]), grad), None, None
        return table.index_add_(0, index, grad), None, None


@pytest.mark.parametrize(
    ("device", "backend", "by_scatter"),
    [
        ("cpu", "aot_eager", False),
        pytest.param("neuron", "neuron", False, marks=requires_neuron),
        pytest.param("neuron", "neuron", True, marks=requires_neuron),
        pytest.param("neuron", "eager", True, marks=requires_neuron),
    ],
)
def test_a_backward_written_by_hand_is_routed_in_one_graph(device, backend, by_scatter):
    table = torch.ones(4, 2, device=device, requires_grad=True)
    index = torch.tensor([0, 0, 1], device=device)
    counter = CompileCounterWithBackend(backend)
    with tns.routing(devices=(device,)):
        compiled = torch.compile(lambda t, i: Read.apply(t * 1, i, by_scatter).sum(), backend=counter, fullgraph=True)
        compiled(table, index).backward()
    assert table.grad[:, 0].tolist() == [2, 1, 0, 0]
    assert counter.frame_count == 1
