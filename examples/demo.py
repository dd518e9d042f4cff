"""The demo, `make demo`: row accumulation on device neuron, three ways to look at it.

1. one small example with repeated indices: torch, the plain gather-add-store kernel, this project's operator;
2. word embeddings trained on English text, on device neuron with routing on and on the CPU, side by side;
3. graphs that torch.compile captures: for the CPU, and for backend neuron.

Each part prints what it found and returns what disagreed; the exit status is 1 when anything did. Where the real Neuron packages
are absent the stand-ins are loaded, and every figure of theirs is called simulated.
"""

import argparse
import collections
import pathlib
import sys
import unittest.mock

import plotext
import torch
from torch._dynamo.backends.common import aot_autograd
from tqdm import tqdm
from word_embeddings import BATCH, COLUMNS, CONTEXT, read_text, train

import torch_neuron_scatter
from torch_neuron_scatter import neuron_packages

INDEX = [0, 0, 1, 2, 2, 2]
ANSWER = [2, 1, 3, 0]

# Fewer steps than this may end on a batch that is harder than the first.
STEPS_TO_LEARN = 50


def load_device():
    """Make device neuron available.

    Returns:
        (str or None, str): how figures of the device are to be called, "measured" or "simulated", or None where there is no
        device; and a line that says what the device is, or why there is none.
    """
    if neuron_packages.inspect_package(*neuron_packages.PACKAGES[0]).state in ("real", "too old"):
        import torch_neuronx  # noqa: F401

        return "measured", "Device neuron: AWS Neuron hardware."
    try:
        torch_neuron_scatter.stub.install()
    except (ImportError, RuntimeError) as error:
        return None, f"Device neuron: absent. {error}"
    return (
        "simulated",
        "Device neuron: stand-in. Its NKI kernels run in a simulator on the CPU: right results, no speed of Trainium.",
    )


def repeated_indices(how):
    """Part 1: prints the example's result three ways. Returns a list of what disagreed."""
    print("1. Rows 0, 0, 1, 2, 2, 2 of a [4] tensor of zeros get 1 added each, by")
    index = torch.tensor(INDEX)
    ways = [
        ("torch.index_add_, CPU", "measured", ANSWER, lambda: torch.zeros(4, 1).index_add_(0, index, torch.ones(6, 1)))
    ]
    if how is not None:
        ways += [
            ("a plain gather-add-store kernel", how, None, _plain_kernel),
            ("this operator, device neuron", how, ANSWER, _this_operator),
        ]
    disagreements = []
    for name, how_run, expected, call in ways:
        result = [int(value) for value in call().cpu().flatten()]
        remark = ""
        if result != ANSWER:
            remark = "  wrong: of the repeats of a row only one counts"
        if expected is not None and result != expected:
            disagreements.append(f"{name} gives {result}, not {expected}")
            remark = "  DISAGREES"
        print(f"   {name:34} {how_run:10} {result}{remark}")
    return disagreements


def _plain_kernel():
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    from torch_neuronx import wrap_nki

    from benchmarks.reference_kernels.gather_add_store import gather_add_store

    input = torch.zeros(4, 1, device="neuron")
    wrap_nki(gather_add_store)[(1,)](
        input, torch.tensor(INDEX, dtype=torch.int32, device="neuron"), torch.ones(6, 1, device="neuron")
    )
    return input


def _this_operator():
    input = torch.zeros(4, 1, device="neuron")
    return torch_neuron_scatter.scatter_add_(
        input, torch.tensor(INDEX, device="neuron"), torch.ones(6, 1, device="neuron")
    )


def word_embeddings(how, steps):
    """Part 2: trains on both devices, plots the losses, prints the comparison. Returns a list of what disagreed."""
    from torch_neuronx import clear_op_tracking, get_fallback_ops

    text = read_text()
    print(f"2. Word embeddings: {len(text.tokens)} words of the Python documentation, {len(text.words)} different,")
    print(f"   D = {COLUMNS}, {steps} steps, the same seed on both devices")
    torch_neuron_scatter.reset_stats()
    clear_op_tracking()
    with torch_neuron_scatter.routing():
        runs = zip(train(text, "cpu", steps), train(text, "neuron", steps, compare=True), strict=True)
        progress = tqdm(runs, total=steps, desc="   training", file=sys.stdout, disable=None)
        on_cpu, on_neuron = collections.deque(progress, maxlen=1).pop()
    counts = torch_neuron_scatter.stats()
    _plot_losses(on_cpu.losses, on_neuron.losses, how)

    gap = max(abs(ours - theirs) for ours, theirs in zip(on_neuron.losses, on_cpu.losses, strict=True))
    gap_tolerance = steps * torch.finfo(torch.float32).eps * on_cpu.losses[0]
    fallbacks = {key.removeprefix("fallback:"): count for key, count in counts.items() if key.startswith("fallback:")}
    others = get_fallback_ops()
    for label, line in (
        ("loss", f"{on_cpu.losses[0]:.3f} at first; at last {on_cpu.losses[-1]:.3f} on the CPU (measured),"),
        ("", f"{on_neuron.losses[-1]:.3f} on neuron ({how})"),
        (
            "largest loss gap",
            f"{gap:.1e}; tolerance {gap_tolerance:.1e}: one float32 rounding of the first loss a step",
        ),
        ("embedding gradient", f"largest difference from torch on the CPU {max(on_neuron.differences):.1e}, at most"),
        ("", f"{max(on_neuron.shares):.0%} of its tolerance: 2(n-1) x 2^-24 x the sum of magnitudes, for"),
        ("", "a word n times in the batch (two orders of n-1 float32 additions each)"),
        (
            "repeated tokens",
            f"{sum(on_neuron.repeated) / steps:.0f} of a batch's {BATCH * len(CONTEXT)} on average share a",
        ),
        ("", "row of the gradient with an earlier one"),
        ("NKI kernel", f"launched {counts['kernel']} times in {steps} steps ({how})"),
        ("handed to torch", ", ".join(f"{reason}: {count}" for reason, count in fallbacks.items()) or "nothing"),
        ("on the CPU instead", f"{len(others)} other operators of the model, which the device has no kernel for"),
    ):
        print(f"   {label:20}{line}")

    disagreements = []
    if not gap <= gap_tolerance:
        disagreements.append(f"losses differ by {gap:.1e}")
    if not all(share <= 1 for share in on_neuron.shares):
        disagreements.append("the embedding's gradient is off by more than its tolerance")
    if counts["kernel"] != steps:
        disagreements.append(f"{counts['kernel']} kernel launches in {steps} steps")
    if any("embedding_dense_backward" in other for other in others):
        disagreements.append("torch computed the embedding's gradient, not the kernel")
    if steps >= STEPS_TO_LEARN and not on_cpu.losses[-1] < on_cpu.losses[0]:
        disagreements.append("the model learnt nothing")
    return disagreements


def _plot_losses(on_cpu, on_neuron, how):
    figure = plotext.figure
    figure.clear()
    figure.plot_size(80, 16)
    figure.title("loss (nats) by step")
    for losses, step, marker, label in (
        (on_cpu, 1, "hd", "torch on the CPU, measured"),
        (on_neuron, max(len(on_neuron) // 25, 1), "o", f"device neuron, {how}"),
    ):
        signal = figure.signal(list(range(0, len(losses), step)), losses[::step], marker=marker)
        if marker == "hd":
            signal.lines()
        signal.label(label)
        figure.draw(signal)
    figure.show(colorless=True)


def compiled_graphs(how):
    """Part 3: prints graphs of row accumulation. Returns a list of what disagreed."""
    print("3. What torch.compile captures of `table.index_add(0, index, rows)` with routing on, CPU tensors")
    graphs = []

    def keep_graph(graph_module, _):
        graphs.append(graph_module)
        return graph_module.forward

    def pool(table, index, rows):
        return table.index_add(0, index, rows)

    with torch_neuron_scatter.routing(devices=("cpu",)):
        result = torch.compile(pool, backend=aot_autograd(fw_compiler=keep_graph), fullgraph=True)(
            torch.zeros(4, 1), torch.tensor(INDEX), torch.ones(6, 1)
        )
    disagreements = show_graph(graphs[-1], "neuron.scatter_add", result, "measured")
    if how == "simulated":
        print("   and what backend neuron is given of the backward of an embedding, device neuron")
        disagreements += show_graph(*embedding_gradient(), how)
    return disagreements


def show_graph(graph, name, result, how):
    """Print a graph and count the nodes whose operator's name starts with `name`. Returns a list of what disagreed."""
    print("\n".join("   " + line for line in graph.code.strip().splitlines() if line))
    nodes = [
        str(node.target) for node in graph.graph.nodes if "scatter" in str(node.target) or "nki" in str(node.target)
    ]
    result = [int(value) for value in result.flatten()]
    print(f"   {len(nodes)} node of {name}, result {result} ({how})")
    disagreements = []
    if len(nodes) != 1 or not nodes[0].startswith(name):
        disagreements.append(f"the graph holds {nodes}, not one node of {name}")
    if result != ANSWER:
        disagreements.append(f"the compiled function gives {result}, not {ANSWER}")
    return disagreements


def embedding_gradient():
    """Backward of an embedding under backend neuron: (graph that the stand-in's backend is given, kernel node's name, gradient)."""
    from torch_neuronx.neuron_dynamo_backend import executor

    graphs = []

    def keep_graph(graph_module, example_inputs):
        graphs.append(graph_module)
        return compile_graph(graph_module, example_inputs)

    # Else a graph compiled before in this process would do, and the backend be given none.
    torch._dynamo.reset()
    compile_graph = executor.compile_graph
    table = torch.zeros(4, 1, device="neuron", requires_grad=True)
    with unittest.mock.patch.object(executor, "compile_graph", keep_graph), torch_neuron_scatter.routing():
        read = torch.compile(torch.nn.functional.embedding, backend="neuron", fullgraph=True)
        read(torch.tensor(INDEX, device="neuron"), table).backward(torch.ones(6, 1, device="neuron"))
    return graphs[-1], "nki_kernel_wrapper", table.grad.cpu()


def main(arguments=None):
    """Run the three parts; exit status 1 when anything disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps of part 2")
    steps = parser.parse_args(arguments).steps
    if steps < 1:
        parser.error(f"--steps is {steps}; accepted is 1 or more")
    how, line = load_device()
    print(f"{line}\n")
    disagreements = repeated_indices(how)
    print()
    if how is None:
        print("2. Word embeddings: SKIPPED, there is no device neuron")
    else:
        disagreements += word_embeddings(how, steps)
    print()
    disagreements += compiled_graphs(how)
    print()
    for disagreement in disagreements:
        print(f"DISAGREES: {disagreement}")
    if not disagreements:
        print("Everything that ran agrees." + ("" if how else " Device neuron did not run."))
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
