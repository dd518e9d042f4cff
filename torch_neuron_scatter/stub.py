"""stub.install(): stand-ins in place of Neuron's packages, for machines without Trainium."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import threading

NAMES = ("nki", "torch_neuronx")
PACKAGE = "torch_neuron_scatter_stub"
BUILD_COMMAND = "pip install --no-build-isolation --force-reinstall --no-deps ."

_lock = threading.RLock()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the stand-ins under their originals' names, before anything on sys.path: PyPI has placeholders of those names."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in NAMES:
            return None
        folder = self.folder / fullname
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def is_installed():
    """Whether the stand-ins are in place."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install():
    """Load the stand-ins: device neuron, and the importable names nki and torch_neuronx. Does nothing the second time.

    Raises:
        RuntimeError: the real torch_neuronx is loaded, or the stand-in's C++ device was not built.
    """
    with _lock:
        if is_installed():
            return
        loaded = sys.modules.get("torch_neuronx")
        if loaded is not None:
            raise RuntimeError(
                f"stub.install(): the real torch_neuronx is loaded (from {getattr(loaded, '__file__', 'memory')}); "
                "the stand-ins are for a process that has not imported it"
            )
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise RuntimeError(f"stub.install(): the package {PACKAGE} is not installed; {_how_to_get_it()}")
        folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
        if not any((folder / "device" / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            raise RuntimeError(f"stub.install(): the stand-in's C++ device is not built; {_how_to_get_it()}")
        try:
            importlib.import_module(f"{PACKAGE}.device")
        except ImportError as error:
            raise RuntimeError(
                f"stub.install(): the stand-in's C++ device does not load ({error}); {_how_to_get_it()}"
            ) from error
        for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
            del sys.modules[name]
        finder = _Finder(folder)
        sys.meta_path.insert(0, finder)
        try:
            for name in NAMES:
                importlib.import_module(name)
        except BaseException:
            sys.meta_path.remove(finder)
            raise


def _how_to_get_it():
    return (
        "with PyTorch and a C++ compiler installed, run in the project's folder: "
        f"{BUILD_COMMAND} (or `make setup`, which does it in .venv)"
    )
