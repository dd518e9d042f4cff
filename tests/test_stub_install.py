"""stub.install(): idempotent, ahead of PyPI's placeholders, and refused beside the real package."""

import subprocess
import sys

import pytest
from conftest import requires_neuron
from expecttest import assert_expected_inline


def run(code, path=None):
    import os

    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")])))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


def test_import_of_the_package_loads_no_neuron_package():
    result = run(
        "import sys, torch_neuron_scatter; print([n for n in ('nki', 'torch_neuronx', 'nkilib') if n in sys.modules])"
    )
    assert result.stdout.strip() == "[]"


@requires_neuron
def test_install_twice_and_from_several_threads():
    code = (
        "import sys, threading, torch_neuron_scatter as t\n"
        "threads = [threading.Thread(target=t.stub.install) for _ in range(6)]\n"
        "[x.start() for x in threads]; [x.join() for x in threads]; t.stub.install()\n"
        "import nki, torch_neuronx, nki.isa\n"
        "print(nki.__version__, torch_neuronx.__version__, sum(type(f).__name__ == '_Finder' for f in sys.meta_path))"
    )
    assert run(code).stdout.strip() == "0.7.0+standin 2.13.3.0+standin 1"


@requires_neuron
def test_placeholders_of_the_same_names_do_not_win(tmp_path):
    for name in ("nki", "torch_neuronx"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('wrong package')")
    code = "import torch_neuron_scatter as t; t.stub.install(); import nki; print(nki.__version__)"
    assert run(code, str(tmp_path)).stdout.strip() == "0.7.0+standin"


def test_refused_once_the_real_package_is_loaded(tmp_path):
    (tmp_path / "torch_neuronx.py").write_text("__version__ = '2.14.3.0'")
    code = (
        "import torch_neuronx, torch_neuron_scatter as t\n"
        "try: t.stub.install()\n"
        "except RuntimeError as error: print(str(error).replace(torch_neuronx.__file__, 'FILE'))"
    )
    assert_expected_inline(
        run(code, str(tmp_path)).stdout,
        """\
stub.install(): the real torch_neuronx is loaded (from FILE); the stand-ins are for a process that has not imported it
""",
    )


def test_without_the_compiled_device_it_says_how_to_get_it(monkeypatch):
    import importlib.machinery

    from torch_neuron_scatter import stub

    monkeypatch.setattr(stub, "is_installed", lambda: False)
    monkeypatch.delitem(sys.modules, "torch_neuronx", raising=False)
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".none"])
    with pytest.raises(RuntimeError) as caught:
        stub.install()
    assert_expected_inline(
        str(caught.value),
        """stub.install(): the stand-in's C++ device is not built; with PyTorch and a C++ compiler installed, run in the project's folder: pip install --no-build-isolation --force-reinstall --no-deps . (or `make setup`, which does it in .venv)""",  # noqa: E501
    )


@requires_neuron
class TestWrapNki:
    """Launches through torch_neuronx.wrap_nki."""

    @staticmethod
    def kernel():
        import importlib

        return importlib.import_module("torch_neuron_scatter.kernels.scatter_add").scatter_add

    def operands(self):
        import torch

        return (
            torch.zeros(4, 2, device="neuron"),
            torch.tensor([0, 0, 3], dtype=torch.int32).to("neuron"),
            torch.ones(3, 2, device="neuron"),
        )

    def test_updates_the_callers_tensor_and_returns_it(self):
        from torch_neuronx import get_executed_ops, wrap_nki

        input, index, src = self.operands()
        assert wrap_nki(self.kernel())[(2,)](input, index, src) is input
        assert input[:, 0].tolist() == [2, 0, 0, 1]
        assert "scatter_add" in get_executed_ops()

    def test_refusals(self):
        from torch_neuronx import wrap_nki

        input, index, src = self.operands()
        caller = wrap_nki(self.kernel())
        with pytest.raises(TypeError, match=r"accepted is what nki\.jit returns"):
            wrap_nki(len)
        with pytest.raises(ValueError, match=r"launch grid is \(3,\)"):
            caller[(3,)]
        with pytest.raises(TypeError, match="takes no further argument 'speed'"):
            caller[(1,)](input, index, src, speed=11)
        with pytest.raises(RuntimeError, match="kernel argument src is on cpu"):
            caller[(1,)](input, index, src.cpu())
        with pytest.raises(RuntimeError, match="kernel argument input has strides"):
            caller[(1,)](input.t(), index, src)
        assert not input.cpu().any()
