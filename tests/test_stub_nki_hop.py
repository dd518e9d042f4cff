"""The stand-in's entry points for kernels in graphs: wrap_nki, nki_op, and the rules of the higher-order operator."""

import pytest
import torch
from conftest import requires_neuron
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = [requires_neuron, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(scope="module")
def kernels():
    """Two kernels of up to 128 rows: one returns two new tensors, one writes its first argument."""
    import nki
    import nki.isa as nisa
    import nki.language as nl

    def scaled(source, factor):
        tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=source)
        result = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=tile, op0=nl.multiply, operand0=float(factor))
        return result

    def twice_and_thrice(source, factor=1.0):
        outputs = []
        for number in (2, 3):
            output = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.shared_hbm)
            nisa.dma_copy(dst=output, src=scaled(source, number * factor))
            outputs.append(output)
        return tuple(outputs)

    def overwrite(destination, source, factor=1.0):
        nisa.dma_copy(dst=destination, src=scaled(source, factor))
        return destination

    return nki.jit(twice_and_thrice), nki.jit(overwrite)


def graph_of(function, *arguments):
    """Graph that backend neuron is given, and what the compiled function returned."""
    from torch_neuronx.neuron_dynamo_backend import executor

    graphs = []
    compile_graph = executor.compile_graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "compile_graph", lambda gm, inputs: graphs.append(gm) or compile_graph(gm, inputs))
        result = torch.compile(function, backend="neuron", fullgraph=True)(*arguments)
    return [node for node in graphs[0].graph.nodes if str(node.target) == "nki_kernel_wrapper"], result


def test_fields_of_a_node_and_a_kernel_that_returns_new_tensors(kernels):
    from torch_neuronx import wrap_nki

    caller = wrap_nki(kernels[0])
    source = torch.arange(6.0).reshape(3, 2).to("neuron")
    (node,), (double, triple) = graph_of(lambda source: caller[(1,)](source + 0, factor=2.0), source)
    assert torch.equal(double.cpu(), source.cpu() * 4) and torch.equal(triple.cpu(), source.cpu() * 6)
    assert node.kwargs["grid"] == (1,) and node.kwargs["operand_output_aliases"] == {}
    assert node.kwargs["arg_names"] == ("source",) and len(node.kwargs["args"]) == 1
    assert "factor=2.0" in node.kwargs["backend_config"]


def test_a_kernel_that_writes_its_argument_is_aliased_and_writes_the_callers_tensor(kernels):
    from torch_neuronx import wrap_nki

    caller = wrap_nki(kernels[1])

    def function(destination, source):
        caller[(1,)](destination, source)
        return destination * 2

    destination, source = torch.zeros(3, 2, device="neuron"), torch.ones(3, 2, device="neuron")
    (node,), result = graph_of(function, destination, source)
    assert node.kwargs["operand_output_aliases"] == {0: 0}
    assert destination.cpu().eq(1).all() and result.cpu().eq(2).all()


def test_an_operand_whose_old_value_is_read_later_is_not_lost(kernels):
    from torch_neuronx import wrap_nki

    caller = wrap_nki(kernels[1])

    def function(destination, source):
        kept = destination * 3
        written = destination.clone()
        caller[(1,)](written, source)
        return kept, written, destination + 0

    destination, source = torch.full((3, 2), 5.0, device="neuron"), torch.ones(3, 2, device="neuron")
    _, (kept, written, old) = graph_of(function, destination, source)
    assert kept.cpu().eq(15).all() and written.cpu().eq(1).all() and old.cpu().eq(5).all()
    assert destination.cpu().eq(5).all()


def test_equal_constants_of_other_types_are_told_apart(kernels):
    from torch_neuronx import nki_hop

    keys = [nki_hop.registry.add_constants({"factor": value}) for value in (1, 1.0, True, 1)]
    assert len(set(keys)) == 3 and keys[0] == keys[3]


def test_nki_op_is_an_operator_eagerly_and_its_body_in_a_graph(kernels):
    from torch_neuronx import get_executed_ops, nki_op, wrap_nki

    caller = wrap_nki(kernels[1])

    @nki_op("tns_test_nki_op::fill_from", mutates_args={"destination"})
    def fill_from(destination: torch.Tensor, source: torch.Tensor, factor: float) -> None:
        caller[(1,)](destination, source, factor)

    destination, source = torch.zeros(3, 2, device="neuron"), torch.ones(3, 2, device="neuron")
    torch.ops.tns_test_nki_op.fill_from(destination, source, 2.0)
    assert destination.cpu().eq(2).all() and "overwrite" in get_executed_ops()

    def function(destination, source):
        torch.ops.tns_test_nki_op.fill_from(destination, source, 3.0)
        return destination + 1

    (node,), result = graph_of(function, destination, source)
    assert node.kwargs["operand_output_aliases"] == {0: 0}
    assert destination.cpu().eq(3).all() and result.cpu().eq(4).all()


def test_shapes_are_inferred_from_the_kernel_without_running_on_the_device(kernels):
    from torch_neuronx import clear_op_tracking, get_executed_ops, wrap_nki

    caller = wrap_nki(kernels[0])
    clear_op_tracking()
    with FakeTensorMode():
        double, triple = caller[(1,)](torch.empty(3, 2, device="neuron"))
    assert double.shape == triple.shape == (3, 2) and double.device.type == "neuron"
    double, _ = caller[(1,)](torch.empty(5, 2, dtype=torch.bfloat16, device="meta"))
    assert double.shape == (5, 2) and double.dtype == torch.bfloat16 and double.device.type == "meta"
    assert get_executed_ops() == []
    graph = make_fx(lambda source: caller[(1,)](source)[0])(torch.ones(3, 2, device="neuron"))
    assert [str(node.target) for node in graph.graph.nodes if "nki" in str(node.target)] == ["nki_kernel_wrapper"]


def test_the_switch_sends_a_call_past_the_operator(kernels):
    from torch_neuronx import nki_hop, wrap_nki

    assert nki_hop.is_wrap_nki_enabled()
    with nki_hop.set_wrap_nki_enabled(False):
        assert not nki_hop.is_wrap_nki_enabled()
        double, _ = wrap_nki(kernels[0])[(1,)](torch.ones(3, 2, device="neuron"))
        with pytest.raises(RuntimeError, match="kernel argument source is on meta"):
            wrap_nki(kernels[0])[(1,)](torch.ones(3, 2, device="meta"))
    assert double.cpu().eq(2).all() and nki_hop.is_wrap_nki_enabled()


def test_arguments_that_do_not_fit_the_kernel(kernels):
    from torch_neuronx import wrap_nki

    caller = wrap_nki(kernels[1])[(1,)]
    tensor = torch.ones(3, 2, device="neuron")
    with pytest.raises(TypeError, match="argument 'source' is missing"):
        caller(tensor)
    with pytest.raises(TypeError, match="takes 3 arguments, 4 came"):
        caller(tensor, tensor, 1.0, 2.0)
    with pytest.raises(TypeError, match="no further argument 'destination'"):
        caller(tensor, tensor, destination=tensor)
