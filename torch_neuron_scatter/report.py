"""The report: what is installed, what will run where and why, and a self-test.

`collect()` gathers and runs, `render()` turns the result into text; neither prints. A check of the self-test compares with a
number worked out by hand or with float64, never with the operator's own result. Checks may be added; each must be able to fail.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform

import torch

from . import dispatch, functional, kernel_choice, neuron_packages
from .ops import plain_cpu_call
from .routing import is_enabled, routing
from .stats import stats


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of the self-test. device: "cpu" or "neuron". passed: whether it held. detail: what came."""

    name: str
    device: str
    passed: bool
    detail: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `collect` found.

    versions: (name, version) pairs. packages: tuple of neuron_packages.Package. cpu, device, routing, lnc: one line each.
    kernels: (call, kernel and why) pairs. checks: tuple of Check. advice: lines that say what is missing and how to get it.
    """

    versions: tuple
    packages: tuple
    cpu: str
    device: str
    kernels: tuple
    routing: str
    lnc: str
    checks: tuple
    advice: tuple

    @property
    def passed(self):
        """Whether every check of the self-test held."""
        return all(check.passed for check in self.checks)


def collect():
    """Look at what is installed and run the self-test on the CPU and, where there is one, on device neuron.

    Returns:
        Report. A check that raises has failed; no exception of the self-test leaves this function.
    """
    packages = neuron_packages.inspect_packages()
    with_neuron = has_neuron()
    return Report(
        versions=(
            ("torch-neuron-scatter", _version("torch-neuron-scatter")),
            ("python", platform.python_version()),
            ("torch", str(torch.__version__)),
        ),
        packages=packages,
        cpu=_cpu_line(),
        device=_device_line(packages, with_neuron),
        kernels=_kernel_lines(),
        routing="on" if is_enabled() else "off; torch_neuron_scatter.enable() turns it on",
        lnc=_lnc_line(),
        checks=_self_test(["cpu", "neuron"] if with_neuron else ["cpu"]),
        advice=missing(packages, with_neuron),
    )


def render(report):
    """The report as text, for a person; no line ends in a newline or trailing blank."""
    stand_in = any(package.state == "stand-in" for package in report.packages)
    lines = [_row(*pair) for pair in report.versions]
    lines += [_row(package.name, _package_text(package)) for package in report.packages]
    lines += [_row("cpu", report.cpu), _row("device neuron", report.device)]
    lines += [_row("routing", report.routing), _row("LNC", report.lnc)]
    lines += ["", "Kernel on device neuron"]
    lines += [_row(*pair) for pair in report.kernels]
    lines += ["", "Self-test" + (" (neuron here is the stand-in: simulated, not measured)" if stand_in else "")]
    width = max(len(check.name) for check in report.checks)
    lines += [
        f"  {'ok' if check.passed else 'FAILED':6}  {check.device:6}  {check.name:{width}}  {check.detail}"
        for check in report.checks
    ]
    failed = sum(not check.passed for check in report.checks)
    lines.append(f"  {len(report.checks)} checks, {failed} failed")
    if report.advice:
        lines += ["", "Missing"]
        lines += [f"  {line}" for line in report.advice]
    return "\n".join(line.rstrip() for line in lines)


def stand_in_line():
    """One line: whether the C++ part of the stand-ins is built, and what follows from it."""
    if has_device_extension():
        return "Stand-in for device neuron: built."
    return (
        "Stand-in for device neuron: NOT built, it needs a C++ compiler and the headers of Python. What needs device neuron "
        "is skipped until then. Install them (g++, python3-dev) and run the same command again."
    )


def has_device_extension():
    """Whether the C++ part of the stand-ins is installed; it is not where there was no compiler."""
    try:
        return importlib.util.find_spec(f"{neuron_packages.STAND_INS}.device._C") is not None
    except ImportError:
        return False


def _row(name, text):
    return f"{name:22}{text}"


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (imported from its source folder)"


def _package_text(package):
    text = {
        "real": f"{package.version or 'version unknown'} (real)",
        "too old": f"{package.version} (real, but older than Neuron SDK 2.33)",
        "stand-in": "stand-in of this project (computes on the CPU)",
        "placeholder": f"{package.version} (an empty placeholder from PyPI, not the real package)",
        "absent": "absent",
    }
    return text[package.state]


def has_neuron():
    """Whether there is a device `neuron` now: the real one, or the stand-in if it has been loaded."""
    neuron = getattr(torch, "neuron", None)
    return neuron is not None and bool(neuron.is_available())


def _device_line(packages, with_neuron):
    if not with_neuron:
        return "absent"
    state = next(package.state for package in packages if package.name == "torch-neuronx")
    count = torch.neuron.device_count()
    return f"{count} device{'s' * (count != 1)}, {'stand-in' if state == 'stand-in' else 'real'}"


def _cpu_line():
    if plain_cpu_call.IN_USE:
        return "torch's index_add_, plain calls without a step through Python"
    return "torch's index_add_ through Python: same results, microseconds more a call (the C++ part is not built for this torch)"


def _lnc_line():
    try:
        lnc = dispatch.configured_lnc()
    except ValueError as error:
        return str(error)
    source = dispatch.LNC_VARIABLE if dispatch.LNC_VARIABLE in os.environ else "the default"
    return f"{lnc} (from {source}; 1 where it does not divide D)"


def _kernel_lines():
    many = kernel_choice.Call(
        rows=32000,
        columns=4096,
        dtype=torch.bfloat16,
        src_dtype=torch.bfloat16,
        has_alpha=False,
        unique_indices=False,
        lnc=2,
    )
    return (
        ("  32,000 x 4,096", _kernel_text(many)),
        ("  unique_indices", _kernel_text(dataclasses.replace(many, unique_indices=True))),
        ("  256 x 4,096", _kernel_text(dataclasses.replace(many, rows=256))),
    )


def _kernel_text(call):
    """The kernel for a call and why; if it is the planner's choice, with the tile sizes it planned."""
    try:
        kernel, reason = kernel_choice.choose(call)
    except ValueError as error:
        return str(error)
    plan = kernel_choice.plan(call)
    return f"{kernel.name}: {plan.reason if plan.form == kernel.name else reason}"


def missing(packages, with_neuron):
    """Lines that say what of `packages` is missing and how to get it; packages as `neuron_packages.inspect_packages` returns."""
    lines = []
    states = {package.name: package.state for package in packages}
    placeholders = [name for name, state in states.items() if state == "placeholder"]
    if placeholders:
        lines.append(
            f"{', '.join(placeholders)}: PyPI's package of that name is empty. Uninstall it; the real one comes"
        )
        lines.append(f"  from {neuron_packages.WHERE_FROM}.")
    old = [name for name, state in states.items() if state == "too old"]
    if old:
        lines.append(f"{', '.join(old)}: too old. Upgrade from {neuron_packages.WHERE_FROM}.")
    absent = [name for name in ("torch-neuronx", "nki") if states[name] == "absent"]
    if absent:
        lines.append(f"{', '.join(absent)}: on a Trainium machine, install from {neuron_packages.WHERE_FROM}.")
    if not with_neuron:
        lines.append("Without device neuron the operators run on the CPU, through torch. To try the rest without")
        lines.append("  Trainium, load the stand-ins: python -m torch_neuron_scatter --stub")
    return tuple(lines)


def _self_test(devices):
    checks = []
    for device in devices:
        checks += [
            _check("repeated indices accumulate", device, _repeated_indices),
            _check("a NaN or Inf stays in its row", device, _non_finite_rows),
            _check("sum as close to float64 as float32 allows", device, _close_to_float64),
        ]
        if device == "neuron":
            checks += [
                _check("the NKI kernel ran, nothing fell back", device, _kernel_ran),
                _check("a routed index_add_ reaches the kernel", device, _routed),
            ]
    return tuple(checks)


def _check(name, device, body):
    try:
        passed, detail = body(device)
    except Exception as error:  # any failure at all is the finding
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, device, bool(passed), detail)


def _example(device):
    """4 rows of zeros, and rows of ones for rows 0, 0, 1, 2, 2, 2."""
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    return torch.zeros(4, 8).to(device), index.to(device), torch.ones(6, 8).to(device)


def _example_answer(result):
    """Whether every column holds the answer, and its first column as text."""
    result = result.cpu()
    expected = torch.tensor([2.0, 1.0, 3.0, 0.0]).unsqueeze(1).expand(4, 8)
    return torch.equal(result, expected), str(result[:, 0].int().tolist())


def _repeated_indices(device):
    return _example_answer(functional.scatter_add_(*_example(device)))


def _non_finite_rows(device):
    input, index, src = _example("cpu")
    src[0, 1], src[2, 2], src[3, 3] = float("nan"), float("inf"), float("-inf")
    result = functional.scatter_add_(*(tensor.to(device) for tensor in (input, index, src))).cpu()
    expected = torch.tensor([2.0, 1.0, 3.0, 0.0]).repeat(8, 1).t().contiguous()
    expected[0, 1], expected[1, 2], expected[2, 3] = float("nan"), float("inf"), float("-inf")
    spread = int((~result.isfinite()).sum()) - 3
    return torch.allclose(result, expected, rtol=0, atol=0, equal_nan=True), f"3 put in, {spread} elsewhere"


def _close_to_float64(device):
    """Error bound for n float32 additions in any order: n * 2**-24 * sum of magnitudes (Higham, section 4.2)."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(10, 16, generator=generator)
    index = torch.randint(10, (300,), generator=generator)
    src = torch.randn(300, 16, generator=generator)
    result = functional.scatter_add_(*(tensor.clone().to(device) for tensor in (input, index, src))).cpu()
    exact = input.double().index_add_(0, index, src.double())
    magnitude = input.abs().double().index_add_(0, index, src.abs().double())
    bound = index.bincount(minlength=10).unsqueeze(1) * 2.0**-24 * magnitude
    error = (result.double() - exact).abs()
    worst = float((error / bound).max())
    return worst <= 1, f"largest error {float(error.max()):.1e}, {worst:.0%} of the bound"


def _launches_of(body):
    before = stats()
    result = body()
    after = stats()
    return result, *(after[key] - before[key] for key in ("kernel", "fallback"))


def _kernel_ran(device):
    _, kernels, fallbacks = _launches_of(lambda: functional.scatter_add_(*_example(device)))
    return (kernels, fallbacks) == (1, 0), f"kernel launches: {kernels}, fallbacks: {fallbacks}"


def _routed(device):
    input, index, src = _example(device)
    with routing():
        result, kernels, fallbacks = _launches_of(lambda: input.index_add_(0, index, src))
    right, answer = _example_answer(result)
    return right and (kernels, fallbacks) == (1, 0), f"{answer}, kernel launches: {kernels}, fallbacks: {fallbacks}"
