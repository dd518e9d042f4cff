"""Modes under torch.compile(backend="neuron"): graphs, graph breaks and recompiles counted, results equal to eager bit for bit."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from conftest import requires_compiler, requires_neuron
from threads import run_in_threads
from torch._dynamo.utils import counters
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

import torch_neuron_scatter as tns

pytestmark = [
    requires_neuron,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:the stand-in for backend neuron runs this graph"),
]

OPS = torch.ops.neuron


def compiled(function, fullgraph=True, **options):
    return torch.compile(function, backend="neuron", fullgraph=fullgraph, **options)


def assert_compiled(graphs, breaks=0):
    assert counters["stats"]["unique_graphs"] == graphs
    assert sum(counters["graph_break"].values()) == breaks


def direct(input, index, src):
    return OPS.scatter_add_(input * 1, 0, index, src).sin()


def routed(input, index, src):
    return (input * 1).index_add_(0, index, src).sin()


def operands(count=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    input, src = torch.randn(10, 4, generator=generator), torch.randn(count, 4, generator=generator)
    return input.to("neuron"), torch.randint(10, (count,), generator=generator).to("neuron"), src.to("neuron")


def gradients(function, *operands):
    """The result and the gradients of all floating operands, on the CPU."""
    leaves = [o.detach().clone().requires_grad_(o.is_floating_point()) for o in operands]
    result = function(*leaves)
    result.sum().backward()
    return [result.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.requires_grad)]


def all_equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


BOTH = pytest.mark.parametrize("function", [direct, routed], ids=lambda f: f.__name__)


def many_counts(function, prepare=lambda *operands: None):
    for seed, count in enumerate((5, 7, 300, 129, 128, 1000)):
        arguments = operands(count, seed)
        prepare(*arguments)
        yield function(*arguments), arguments


@BOTH
def test_a_count_that_changes_at_every_call_recompiles_once(function):
    with tns.routing():
        for result, arguments in many_counts(compiled(function)):
            assert torch.equal(result.cpu(), function(*arguments).cpu())
    assert_compiled(graphs=2)


@BOTH
def test_dynamic_compiles_once(function, monkeypatch):
    # A graph that leaves N open has the kernel for many rows; eagerly few rows have another, which adds in another order.
    monkeypatch.setenv("TORCH_NEURON_SCATTER_KERNEL", "grouped")
    with tns.routing():
        for result, arguments in many_counts(compiled(function, dynamic=True)):
            assert torch.equal(result.cpu(), function(*arguments).cpu())
    assert_compiled(graphs=1)


def test_a_dimension_marked_dynamic_compiles_once():
    def mark(input, index, src):
        torch._dynamo.mark_dynamic(index, 0)
        torch._dynamo.mark_dynamic(src, 0)

    for result, arguments in many_counts(compiled(direct), mark):
        assert torch.equal(result.cpu(), direct(*arguments).cpu())
    assert_compiled(graphs=1)


def test_dynamic_shapes_are_said_to_be_the_stand_ins_alone():
    with pytest.warns(UserWarning, match="TorchNeuron .* rejects dynamic=True"):
        compiled(direct, dynamic=True)(*operands())


def test_dynamic_shapes_of_a_backward():
    def loss(table, index):
        return (embedding(index, table) ** 2).sum()

    with tns.routing():
        function = compiled(loss)
        for seed, count in enumerate((5, 7, 300, 129)):
            table, index, _ = operands(count, seed)
            assert all_equal(gradients(function, table, index), gradients(loss, table, index))
    assert_compiled(graphs=2)


@BOTH
def test_gradients(function):
    with tns.routing():
        assert all_equal(gradients(compiled(function), *operands()), gradients(function, *operands()))
    assert_compiled(graphs=1)


@BOTH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(function, use_reentrant):
    def recomputed(input, index, src):
        return checkpoint(function, input, index, src, use_reentrant=use_reentrant)

    with tns.routing():
        got = gradients(compiled(recomputed, fullgraph=not use_reentrant), *operands())
        assert all_equal(got, gradients(function, *operands()))
    assert_compiled(graphs=1)


def test_torch_func_transforms():
    input, index, src = operands()

    def transforms(op):
        def call(src):
            return op(input, 0, index, src).sin()

        def function(src):
            gradient = torch.func.grad(lambda src: call(src).sum())(src)
            _, tangent = torch.func.jvp(call, (src,), (torch.ones_like(src),))
            _, pull = torch.func.vjp(call, src)
            batched = torch.func.vmap(call)(torch.stack([src, src * 2]))
            return gradient, tangent, *pull(torch.ones_like(input)), batched

        return function

    got = [result.cpu() for result in compiled(transforms(OPS.scatter_add))(src)]
    assert all_equal(got, [result.cpu() for result in transforms(OPS.scatter_add)(src)])
    assert_compiled(graphs=1)


@BOTH
def test_inference_mode(function):
    call = compiled(function)
    with tns.routing(), torch.inference_mode():
        assert torch.equal(call(*operands()).cpu(), function(*operands()).cpu())
    assert_compiled(graphs=1)


def test_deterministic_algorithms_raise_no_error_and_change_nothing():
    """Repeats in one row, many tiles; the store order of the simulator is shuffled from launch to launch."""
    table, index, _ = operands(1000)

    def loss(table, index):
        rows = embedding(index, table) + table.index_select(0, index) + table[index]
        return table.index_add(0, index, rows).sum()

    torch.use_deterministic_algorithms(True)
    try:
        with tns.routing():
            runs = [gradients(call, table, index) for call in (loss, loss, compiled(loss), compiled(loss))]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(all_equal(run, runs[0]) for run in runs[1:])
    assert_compiled(graphs=1)


def test_beside_a_compiled_optimizer_step():
    def train(compile_all):
        table, index, _ = operands()
        table = table.requires_grad_()
        optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9, foreach=False)
        loss, step = lambda: (embedding(index, table) ** 2).sum(), optimizer.step
        if compile_all:
            loss, step = compiled(loss), torch.compile(step, backend="neuron")
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            step()
        return table.detach().cpu()

    with tns.routing():
        assert torch.equal(train(True), train(False))
    # The loss, and the optimizer's step at its first call and, with a momentum there, at its second; the break is torch's own.
    assert_compiled(graphs=3, breaks=1)


def test_compiled_autograd():
    table, index, _ = operands()

    def loss(table, index):
        return (embedding(index, table) ** 2).sum()

    with tns.routing():
        expected = gradients(loss, table, index)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="neuron", fullgraph=True)):
            got = gradients(compiled(loss), table, index)
    assert all_equal(got, expected)
    assert counters["compiled_autograd"]["captures"] == 1


def test_another_mode_warns_and_compiles_in_the_default_one(caplog):
    result = torch.compile(direct, backend="neuron", mode="max-autotune")(*operands())
    assert torch.equal(result.cpu(), direct(*operands()).cpu())
    assert "'max-autotune'" in caplog.text and "default" in caplog.text
    assert_compiled(graphs=1)


def test_compiled_code_follows_routing_forward_and_backward():
    """A function compiled once with routing off and once with it on is right in both states ever after."""
    table, index, _ = operands()
    function = compiled(lambda table, index: table.index_select(0, index).sin())
    expected = gradients(lambda table, index: table.index_select(0, index).sin(), table, index)
    import torch_neuronx

    for enabled in (True, False, True, False, True):
        with tns.routing(enabled):
            torch_neuronx.clear_op_tracking()
            got = gradients(function, table, index)
            assert all_equal(got, expected)
            kernels = [name for name in torch_neuronx.get_executed_ops() if name.endswith("_scatter_add")]
            assert bool(kernels) == enabled
    assert_compiled(graphs=2)


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_a_backward_runs_as_its_forward_was_compiled(order):
    """Switching between forward and backward changes no result."""
    table, index, _ = operands()
    function = compiled(lambda table, index: table.index_select(0, index).sin().sum())
    expected = gradients(lambda table, index: table.index_select(0, index).sin().sum(), table, index)[1]
    leaf = table.clone().requires_grad_()
    with tns.routing(order[0]):
        loss = function(leaf, index)
    with tns.routing(order[1]):
        loss.backward()
    assert torch.equal(leaf.grad.cpu(), expected)
    assert_compiled(graphs=1)


def test_threads_that_compile_and_run_at_once():
    def work(number):
        def loss(table, index):
            return (embedding(index, table) ** 2).sum() * (number + 1)

        function = compiled(loss)
        for count in (5, 6, 300):
            table, index, _ = operands(count, number)
            assert all_equal(gradients(function, table, index), gradients(loss, table, index))

    with tns.routing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_in_threads(2, work)


class Model(torch.nn.Module):
    def forward(self, input, index, src):
        return (input * 2).index_add_(0, index, src)


@pytest.mark.parametrize("device", ["cpu", "neuron"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export_saved_and_loaded_runs(tmp_path, device, strict, dynamic):
    arguments = tuple(operand.to(device) for operand in operands())
    count = {0: torch.export.Dim("K", min=2, max=2000)}
    shapes = {"input": None, "index": count, "src": count} if dynamic else None
    with tns.routing(devices=(device,)):
        program = torch.export.export(Model(), arguments, strict=strict, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert "neuron.scatter_add_.default" in [str(node.target) for node in loaded.graph.nodes]
    other = tuple(operand.to(device) for operand in operands(300 if dynamic else 7, seed=1))
    with tns.routing(devices=(device,)):
        expected = Model()(*other).cpu()
    for module in (loaded.module(), loaded.run_decompositions().module()):
        assert torch.equal(module(*other).cpu(), expected)


@requires_compiler
@pytest.mark.parametrize("op", [OPS.scatter_add_, OPS.scatter_add], ids=str)
@pytest.mark.parametrize("options", [{}, {"alpha": 2}, {"alpha": 0.5, "unique_indices": True, "lnc": 1}], ids=str)
def test_an_aot_inductor_package_on_the_cpu(tmp_path, op, options):
    class Scatter(torch.nn.Module):
        def forward(self, input, index, src):
            return op(input * 2, 0, index, src, **options)

    arguments = tuple(operand.cpu() for operand in operands())
    program = torch.export.export(Scatter(), arguments)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(package)(*arguments), Scatter()(*arguments))


PROCESS = """
import os, sys, torch, torch_neuron_scatter as tns
from torch._dynamo.utils import counters
tns.stub.install()
tns.enable(devices=("neuron", "cpu"))
{body}
print("right", flush=True)
"""

# On the CPU, where Inductor has a cache on disk: routing decides what is in the graph, and so what the cache may hand out.
WARM_CACHE = """
def function(input, index, src):
    return (input * 2).index_add_(0, index, src)
arguments = torch.ones(4, 2), torch.tensor([0, 0, 1]), torch.ones(3, 2)
for enabled in (True, False, True):
    with tns.routing(enabled, devices=("cpu",)):
        torch._dynamo.reset()
        result, codes = torch._inductor.utils.run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
        assert result[:, 0].tolist() == [4, 3, 2, 2], result
        assert ("neuron.scatter_add_" in "".join(codes)) == enabled, codes
print(counters["inductor"]["fxgraph_cache_hit"], flush=True)
table = torch.ones(4, 2, device="neuron", requires_grad=True)
torch.compile(lambda t, i: t.index_select(0, i).sum(), backend="neuron", fullgraph=True)(
    table, torch.tensor([0, 0, 1], device="neuron")).backward()
assert table.grad[:, 0].tolist() == [2, 1, 0, 0]
"""

FORKED = """
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
input = torch.zeros(4, 2, device="neuron")
torch.compile(lambda x, i, s: x.index_add_(0, i, s), backend="neuron", fullgraph=True)(
    input, torch.tensor([0, 0, 1], device="neuron"), torch.ones(3, 2, device="neuron"))
assert input[:, 0].tolist() == [2, 1, 0, 0]
"""


def run_process(body, **environment):
    run = subprocess.run(
        [sys.executable, "-c", PROCESS.format(body=body)],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, **environment),
    )
    assert "right" in run.stdout, run.stderr
    return run.stdout.split()


@requires_compiler
def test_a_second_process_with_a_warm_cache(tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (run_process(WARM_CACHE, **cache)[0] for _ in range(2))
    assert (first, second) == ("1", "3")


def test_a_process_forked_after_the_import():
    """The device is first used in the child, as a data loader or a launcher does."""
    run_process(FORKED)
