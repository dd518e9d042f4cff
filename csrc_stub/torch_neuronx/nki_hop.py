"""NKI kernels in PyTorch programs: eager launches, and nodes of compiled graphs.

    wrap_nki(kernel)[(lnc,)](*args)     -> nki_kernel_wrapper, the higher-order operator -> the simulator, or a node
    nki_op(name, fn, mutates_args=...)  a custom operator whose Python body the compiler looks into

After the documentation ("How to work with NKI kernels from torch-neuronx", SDK 2.33) and the operator's public fields. A kernel's
tensors are its run-time arguments; everything else is a compile-time constant, kept aside under `constant_args_key`. An operand
that the kernel returns is written in place: `operand_output_aliases` maps its position among the tensors to that of the result,
and the node's result is the new value of the operand.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils import _pytree as pytree

from . import kernel_launch

GRIDS = ((1,), (2,))
NO_CONSTANTS = -1

# Stands for a size that nothing is known about while tracing; several tiles, and no whole number of them.
UNKNOWN_SIZE = 300

_switch = threading.local()


def is_wrap_nki_enabled():
    """Whether calls in this thread go through the higher-order operator, rather than straight to the device."""
    return getattr(_switch, "enabled", True)


@contextlib.contextmanager
def set_wrap_nki_enabled(enabled):
    """Inside, calls in this thread go through the higher-order operator or not."""
    before = is_wrap_nki_enabled()
    _switch.enabled = enabled
    try:
        yield
    finally:
        _switch.enabled = before


class _Registry:
    """Kernels and sets of constant arguments by the numbers that stand for them in graphs; both only grow."""

    def __init__(self):
        self._lock = threading.Lock()
        self._kernels, self._kernel_numbers = [], {}
        self._constants, self._constant_numbers = [], {}

    def add_kernel(self, kernel):
        with self._lock:
            number = self._kernel_numbers.setdefault(kernel.func, len(self._kernels))
            if number == len(self._kernels):
                self._kernels.append(kernel)
            return number

    def kernel(self, number):
        return self._kernels[number]

    def add_constants(self, constants):
        # repr tells 1, 1.0 and True apart, which are equal.
        key = tuple((name, repr(value)) for name, value in sorted(constants.items()))
        with self._lock:
            number = self._constant_numbers.setdefault(key, len(self._constants))
            if number == len(self._constants):
                self._constants.append(dict(constants))
            return number

    def constants(self, number):
        return {} if number == NO_CONSTANTS else self._constants[number]


registry = _Registry()


class NkiKernelWrapper(HigherOrderOperator):
    """A launch of a registered kernel; see the module's text for the fields."""

    def __init__(self):
        super().__init__("nki_kernel_wrapper", cacheable=True)

    def __call__(self, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names, constant_args_key):
        return super().__call__(
            kernel_idx=kernel_idx,
            grid=grid,
            backend_config=backend_config,
            operand_output_aliases=operand_output_aliases,
            args=args,
            arg_names=arg_names,
            constant_args_key=constant_args_key,
        )


nki_kernel_wrapper = torch._dynamo.allow_in_graph(NkiKernelWrapper())

for _key in (
    DispatchKey.PythonDispatcher,
    DispatchKey.PythonTLSSnapshot,
    DispatchKey.ADInplaceOrView,
    DispatchKey.BackendSelect,
    DispatchKey.AutocastCPU,
    DispatchKey.AutocastPrivateUse1,
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradPrivateUse1,
):
    nki_kernel_wrapper.fallthrough(_key)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A launch with its tensors and constants apart, and what tracing the kernel says of it."""

    tensors: tuple
    names: tuple
    constants_key: int
    config: object

    @property
    def aliases(self):
        return self.config.operand_output_aliases


def _launch(kernel_idx, grid, args, arg_names, constants_key):
    given = dict(zip(arg_names, args, strict=True))
    constants = dict(registry.constants(constants_key))
    constants.update((name, value) for name, value in given.items() if not isinstance(value, torch.Tensor))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return _Launch(
        tuple(tensors.values()),
        tuple(tensors),
        registry.add_constants(constants),
        _traced(registry.kernel(kernel_idx), tuple(grid), tensors, constants),
    )


def _traced(kernel, grid, tensors, constants):
    """Result types and aliases. Symbolic sizes stand in with their hints, so that nothing of the graph hangs on their values."""
    shapes = tuple(
        (name, tuple(optimization_hint(size, fallback=UNKNOWN_SIZE) for size in value.shape), value.dtype)
        for name, value in tensors.items()
    )
    return _traced_once(kernel, grid, shapes, registry.add_constants(constants))


@functools.cache
def _traced_once(kernel, grid, shapes, constants_key):
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        metas = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in shapes}
        return kernel[grid].dump_config(**metas, **registry.constants(constants_key))


def _results(launch, make):
    """One result, or a tuple: an operand's twin where it is written in place, else make(shape, dtype)."""
    operands = {result: operand for operand, result in launch.aliases.items()}
    results = tuple(
        launch.tensors[operands[position]].new_empty(launch.tensors[operands[position]].shape)
        if position in operands
        else make(shape, dtype)
        for position, (dtype, shape) in enumerate(launch.config.return_types)
    )
    return results if launch.config.returns_tuple else results[0]


@nki_kernel_wrapper.py_impl(DispatchKey.Meta)
def _meta(*, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names, constant_args_key):
    launch = _launch(kernel_idx, grid, args, arg_names, constant_args_key)
    return _results(launch, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))


@nki_kernel_wrapper.py_impl(FakeTensorMode)
def _fake(mode, *, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names, constant_args_key):
    launch = _launch(kernel_idx, grid, args, arg_names, constant_args_key)
    with mode:
        return _results(launch, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="neuron"))


@nki_kernel_wrapper.py_impl(ProxyTorchDispatchMode)
def _proxy(mode, *, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names, constant_args_key):
    launch = _launch(kernel_idx, grid, args, arg_names, constant_args_key)
    fields = {
        "kernel_idx": kernel_idx,
        "grid": tuple(grid),
        "backend_config": launch.config.dumped_config,
        "operand_output_aliases": dict(launch.aliases),
        "args": launch.tensors,
        "arg_names": launch.names,
        "constant_args_key": launch.constants_key,
    }
    with disable_proxy_modes_tracing():
        result = nki_kernel_wrapper(**fields)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, fields)
    name = f"{registry.kernel(kernel_idx).__name__}_proxy"
    node = mode.tracer.create_proxy("call_function", nki_kernel_wrapper, (), proxies, name=name)
    return track_tensor_tree(result, node, constant=None, tracer=mode.tracer)


@nki_kernel_wrapper.py_functionalize_impl
def _functionalize(ctx, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names, constant_args_key):
    unwrapped = tuple(ctx.unwrap_tensors(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    launch = _launch(kernel_idx, grid, unwrapped, arg_names, constant_args_key)
    with ctx.redispatch_to_next():
        results = nki_kernel_wrapper(
            kernel_idx=kernel_idx,
            grid=grid,
            backend_config=launch.config.dumped_config,
            operand_output_aliases=dict(launch.aliases),
            args=unwrapped,
            arg_names=arg_names,
            constant_args_key=constant_args_key,
        )
    values = results if isinstance(results, tuple) else (results,)
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    for operand, position in launch.aliases.items():
        ctx.replace(operands[operand], values[position])
        ctx.mark_mutation_hidden_from_autograd(operands[operand])
        ctx.commit_update(operands[operand])
        ctx.sync(operands[operand])
    return ctx.wrap_tensors(results)


@nki_kernel_wrapper.py_impl(DispatchKey.CompositeExplicitAutograd)
def _dense(*, kernel_idx, grid, backend_config, operand_output_aliases, args, arg_names, constant_args_key):
    arguments = dict(registry.constants(constant_args_key), **dict(zip(arg_names, args, strict=True)))
    return kernel_launch.launch(registry.kernel(kernel_idx), grid, arguments)


class _Caller:
    def __init__(self, kernel_idx, signature, grid):
        self.kernel_idx, self.signature, self.grid = kernel_idx, signature, grid

    def __getitem__(self, grid):
        grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
        if grid not in GRIDS:
            raise ValueError(f"launch grid is {grid}; accepted are (1,) and (2,), the logical NeuronCores of a launch")
        return _Caller(self.kernel_idx, self.signature, grid)

    def __call__(self, *args, **kwargs):
        """Launch, or put the launch into the graph that is being traced.

        Tensors must be contiguous on device neuron; other arguments are compile-time constants. A result that is one of the
        kernel's arguments comes back as the caller's own tensor.
        """
        arguments = _bind(self.signature, args, kwargs)
        if not is_wrap_nki_enabled():
            return kernel_launch.launch(registry.kernel(self.kernel_idx), self.grid, arguments)
        return nki_kernel_wrapper(
            kernel_idx=self.kernel_idx,
            grid=self.grid,
            backend_config="",
            operand_output_aliases={},
            args=tuple(arguments.values()),
            arg_names=tuple(arguments),
            constant_args_key=NO_CONSTANTS,
        )


def _bind(signature, args, kwargs):
    """Arguments by name, defaults included. `signature` is a tuple of (name, default), since Dynamo traces through here."""
    names = tuple(name for name, _ in signature)
    if len(args) > len(names):
        raise TypeError(f"the kernel takes {len(names)} arguments, {len(args)} came")
    given = dict(zip(names, args))  # noqa: B905  (fewer arguments than names: the rest has defaults)
    for name, value in kwargs.items():
        if name not in names or name in given:
            raise TypeError(f"the kernel takes no further argument {name!r}; its arguments are {', '.join(names)}")
        given[name] = value
    bound = {}
    for name, default in signature:
        if name not in given and default is inspect.Parameter.empty:
            raise TypeError(f"the kernel's argument {name!r} is missing")
        bound[name] = given.get(name, default)
    return bound


@torch._dynamo.assume_constant_result
def _register(nki_kernel):
    return registry.add_kernel(nki_kernel)


def wrap_nki(nki_kernel):
    """Make a kernel decorated with `nki.jit` callable on device tensors, eagerly and in graphs.

    Args:
        nki_kernel: what `nki.jit` returned.

    Returns:
        A caller; `caller[(lnc,)]` sets the launch grid, calling it launches.

    Raises:
        TypeError: nki_kernel did not come from `nki.jit`.
    """
    if not hasattr(nki_kernel, "sign") or not hasattr(nki_kernel, "func"):
        raise TypeError(f"wrap_nki: nki_kernel is {type(nki_kernel).__name__}; accepted is what nki.jit returns")
    signature = tuple((name, parameter.default) for name, parameter in nki_kernel.sign.parameters.items())
    return _Caller(_register(nki_kernel), signature, (1,))


def nki_op(name, fn=None, mutates_args=()):
    """A custom operator with a Python body that launches NKI kernels and is traceable with fake tensors.

    Args:
        name (str): "namespace::operator".
        fn: the body, annotated as torch.library.custom_op wants it; without it, nki_op is a decorator.
        mutates_args: names of the arguments that the body writes, or "unknown".

    Returns:
        The operator, a torch.library.CustomOpDef. Compiled graphs hold what the body does, not the operator.
    """
    if fn is None:
        return functools.partial(nki_op, name, mutates_args=mutates_args)

    @functools.wraps(fn)
    def eager(*args, **kwargs):
        with set_wrap_nki_enabled(False):
            return fn(*args, **kwargs)

    operator = torch.library.custom_op(name, eager, mutates_args=mutates_args)
    operator.register_fake(fn)

    @operator.register_torch_dispatch(FunctionalTensorMode)
    def traced(mode, op, types, args, kwargs):
        if not all(kind in (torch.Tensor, FunctionalTensor) or issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        with mode:
            return fn(*args, **kwargs)

    return operator
