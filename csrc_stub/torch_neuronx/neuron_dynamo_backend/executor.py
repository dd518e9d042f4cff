"""Takes what AOTAutograd captured, refuses what the backend cannot lower, and runs the rest on the stand-in device.

A graph is functional: a kernel node's result is a new value. Where the kernel writes an operand in place, the operand's memory
becomes the result's if nothing reads the operand's old value afterwards; else the operand is copied first, as a compiler does.
"""

import contextlib

import torch
from functorch.compile import make_boxed_func

from ..nki_hop import nki_kernel_wrapper

PYTHON_MODULES = ("_operator", "builtins", "math")


class UnsupportedNode(RuntimeError):
    """A node that backend neuron cannot lower."""


def _check(node):
    if node.op != "call_function" or node.target is nki_kernel_wrapper:
        return
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return
    if getattr(target, "__module__", None) in PYTHON_MODULES or target in (
        torch.sym_max,
        torch.sym_min,
        torch.sym_float,
    ):
        return
    raise UnsupportedNode(
        f"backend neuron cannot lower node {node.name}, a call of {target}; accepted are aten operators, NKI kernel nodes "
        "(torch_neuronx.nki_op and wrap_nki) and Python operators"
    )


def _views(node):
    """The node and every node whose value shares its memory."""
    found, queue = {node}, [node]
    while queue:
        current = queue.pop()
        around = [user for user in current.users if _is_view(user)]
        if _is_view(current):
            around.append(current.args[0])
        for other in around:
            if other not in found:
                found.add(other)
                queue.append(other)
    return found


def _is_view(node):
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.is_view
        and isinstance(node.args[0], torch.fx.Node)
    )


def _written_back(node, result):
    """Whether `node`, an input of the graph, takes the value of `result`, or of a view of it, at the end."""
    results = _views(result)
    return any(
        user.target is torch.ops.aten.copy_.default and user.args[0] is node and user.args[1] in results
        for user in node.users
    )


def _copied_operands(graph):
    """Kernel node -> positions of the operands that must be copied before the kernel writes them."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    copied = {}
    for node in graph.nodes:
        if node.target is not nki_kernel_wrapper:
            continue
        operands = node.kwargs["args"]
        for operand in node.kwargs["operand_output_aliases"]:
            sharing = _views(operands[operand])
            inputs = [other for other in sharing if other.op in ("placeholder", "get_attr")]
            read_later = any(
                order[user] > order[node]
                for other in sharing
                for user in other.users
                if user not in sharing and not (user.target is torch.ops.aten.copy_.default and user.args[0] is other)
            )
            read_twice = sum(value in sharing for value in operands) > 1
            if read_later or read_twice or not all(_written_back(other, node) for other in inputs):
                copied.setdefault(node, []).append(operand)
    return copied


class _Executor(torch.fx.Interpreter):
    def __init__(self, gm, copied):
        super().__init__(gm)
        self._copied = copied

    @contextlib.contextmanager
    def _set_current_node(self, node):
        # Not the base class's: it keeps the node in a global of the process, which a thread that compiles meanwhile works with.
        self._running = node
        yield

    def call_function(self, target, args, kwargs):
        if target is nki_kernel_wrapper:
            copied = self._copied.get(self._running, ())
            operands = tuple(value.clone() if place in copied else value for place, value in enumerate(kwargs["args"]))
            return target(**dict(kwargs, args=operands))
        if target is torch.ops.aten.copy_.default and _same_memory(*args[:2]):
            return args[0]
        return super().call_function(target, args, kwargs)


def _same_memory(first, second):
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )


def compile_graph(gm, example_inputs):
    """A function that runs the graph.

    Raises:
        UnsupportedNode: naming the first node that is neither aten, nor a kernel node, nor a Python operator.
    """
    for node in gm.graph.nodes:
        _check(node)
    copied = _copied_operands(gm.graph)

    def run(*args):
        # An interpreter holds the values of one run, and threads share the compiled function.
        return _Executor(gm, copied).run(*args)

    return make_boxed_func(run)
