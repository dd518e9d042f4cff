"""The report: what it says about packages, and that its self-test fails when the operator is wrong.

Wrong operators are put in place of `functional.scatter_add_`, which is the only one that the self-test calls.
"""

import dataclasses
import subprocess
import sys

import expecttest
import pytest
import torch

from torch_neuron_scatter import __main__ as command
from torch_neuron_scatter import functional, neuron_packages, report

without_neuron_sdk = pytest.mark.skipif(
    neuron_packages.inspect_package("torch-neuronx", "torch_neuronx").state == "real",
    reason="the Neuron SDK is installed",
)


def run_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "torch_neuron_scatter", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@without_neuron_sdk
def test_runs_on_the_cpu_and_says_how_to_get_what_is_missing():
    done = run_command()
    assert done.returncode == 0, done.stderr
    assert "3 checks, 0 failed" in done.stdout
    assert "device neuron         absent" in done.stdout
    assert neuron_packages.WHERE_FROM in done.stdout
    assert "--stub" in done.stdout
    assert "simulated" not in done.stdout


@without_neuron_sdk
def test_stub_flag_adds_device_neuron_and_calls_it_simulated(neuron):
    done = run_command("--stub")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 checks, 0 failed" in done.stdout
    assert "stand-in of this project" in done.stdout
    assert "simulated, not measured" in done.stdout
    assert "kernel launches: 1, fallbacks: 0" in done.stdout


def test_stub_flag_exits_1_with_the_reason_when_the_stand_ins_cannot_be_loaded(monkeypatch, capsys):
    def install():
        raise ImportError("no compiled device")

    monkeypatch.setattr("torch_neuron_scatter.stub.install", install)
    assert command.main(["--stub"]) == 1
    assert capsys.readouterr().err == "The stand-ins cannot be loaded: no compiled device\n"


def keep_last_of_repeated_rows(input, index, src):
    return input.index_put_((index,), input[index] + src)


def poison_with_non_finite_values(input, index, src):
    one_hot = torch.nn.functional.one_hot(index.cpu(), len(input)).to(src.dtype).to(src.device)
    return input.add_(one_hot.t() @ src)


def round_to_bfloat16(input, index, src):
    return input.copy_(input.bfloat16().index_add_(0, index, src.bfloat16()))


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (keep_last_of_repeated_rows, "repeated indices accumulate"),
        (poison_with_non_finite_values, "a NaN or Inf stays in its row"),
        (round_to_bfloat16, "sum as close to float64 as float32 allows"),
    ],
)
def test_exits_1_when_the_operator_is_wrong(monkeypatch, capsys, wrong, check):
    monkeypatch.setattr(functional, "scatter_add_", wrong)
    assert command.main([]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  FAILED")]
    assert any("cpu" in line and check in line for line in lines), lines


def test_a_check_that_raises_has_failed(monkeypatch):
    def raising(input, index, src):
        raise ValueError("broken")

    monkeypatch.setattr(functional, "scatter_add_", raising)
    collected = report.collect()
    assert not collected.passed
    assert collected.checks[0].detail == "ValueError: broken"


def test_fails_when_the_kernel_is_not_what_ran_on_neuron(neuron, monkeypatch):
    monkeypatch.setattr(
        functional,
        "scatter_add_",
        lambda input, index, src: input.copy_(input.cpu().index_add_(0, index.cpu(), src.cpu())),
    )
    failed = [(check.device, check.name) for check in report.collect().checks if not check.passed]
    assert failed == [("neuron", "the NKI kernel ran, nothing fell back")]


def test_an_environment_variable_that_names_no_kernel_is_reported(monkeypatch):
    monkeypatch.setenv("TORCH_NEURON_SCATTER_KERNEL", "fastest")
    assert "TORCH_NEURON_SCATTER_KERNEL is 'fastest'" in report.render(report.collect())


@pytest.fixture
def install_fake(tmp_path, monkeypatch):
    """A function that puts a distribution with a module into an empty folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, version, description, module=None):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{description}\n")
        if module is not None:
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text("raise ImportError('importing it is wrong')\n")

    return install


@pytest.mark.parametrize(
    ("version", "description", "module", "state"),
    [
        ("0.0.1", "WRONG PACKAGE. Please install the package from elsewhere", "fake_sdk", "placeholder"),
        ("0.0.2", "The library does not publish installable wheels to PyPI.", None, "placeholder"),
        ("0.6.1", "The kernel interface", "fake_sdk", "too old"),
        ("0.7.0+build5", "The kernel interface", "fake_sdk", "real"),
        ("0.10.0", "The kernel interface", "fake_sdk", "real"),
        ("0.7.0", "The kernel interface", None, "absent"),
    ],
)
def test_package_is_recognised_without_importing_it(install_fake, version, description, module, state):
    install_fake("fake-sdk", version, description, module)
    assert neuron_packages.inspect_package("fake-sdk", "fake_sdk", "0.7").state == state
    assert "fake_sdk" not in sys.modules


def test_a_package_that_is_not_there_is_absent():
    assert neuron_packages.inspect_package("fake-sdk", "fake_sdk").state == "absent"


class TestText(expecttest.TestCase):
    def test_text_of_a_report(self):
        package = neuron_packages.Package
        text = report.render(
            report.Report(
                versions=(("torch-neuron-scatter", "1.2"), ("python", "3.12.1"), ("torch", "2.13.0")),
                packages=(
                    package("torch-neuronx", "torch_neuronx", "1.0", "placeholder"),
                    package("nki", "nki", "0.6.0", "too old"),
                    package("neuronx-cc", "neuronxcc", "2.33.1", "real"),
                    package("nki-library", "nkilib", None, "absent"),
                ),
                cpu="through Python",
                device="absent",
                kernels=(("  indices may repeat", "tiled: right"),),
                routing="off",
                lnc="2",
                checks=(
                    report.Check("adds", "cpu", True, "[2]"),
                    report.Check("isolates", "cpu", False, "1 elsewhere"),
                ),
                advice=("Install it.",),
            )
        )
        self.assertExpectedInline(
            text,
            """\
torch-neuron-scatter  1.2
python                3.12.1
torch                 2.13.0
torch-neuronx         1.0 (an empty placeholder from PyPI, not the real package)
nki                   0.6.0 (real, but older than Neuron SDK 2.33)
neuronx-cc            2.33.1 (real)
nki-library           absent
cpu                   through Python
device neuron         absent
routing               off
LNC                   2

Kernel on device neuron
  indices may repeat  tiled: right

Self-test
  ok      cpu     adds      [2]
  FAILED  cpu     isolates  1 elsewhere
  2 checks, 1 failed

Missing
  Install it.""",
        )


def test_advice_names_each_placeholder_and_each_absent_package():
    packages = tuple(
        neuron_packages.Package(name, module, "1.0", state)
        for (name, module, _), state in zip(
            neuron_packages.PACKAGES, ("placeholder", "absent", "placeholder", "absent"), strict=True
        )
    )
    advice = "\n".join(report.missing(packages, with_neuron=False))
    assert "torch-neuronx, neuronx-cc: PyPI's package of that name is empty" in advice
    assert "nki: on a Trainium machine, install from" in advice


def test_report_is_not_passed_when_one_check_failed():
    collected = report.collect()
    failed = dataclasses.replace(collected.checks[0], passed=False)
    assert collected.passed
    assert not dataclasses.replace(collected, checks=(*collected.checks, failed)).passed
