"""What of the Neuron SDK is installed: the real package, a stand-in, PyPI's placeholder, or nothing.

Looks at installed metadata and at where an import would load from; imports none of the packages and needs none of them.
PACKAGES may grow; a placeholder is known by what its description says, not by its version, so that a new one is known too.
"""

import dataclasses
import importlib.metadata
import importlib.util
import pathlib

from torch.torch_version import TorchVersion

# The oldest versions that are supported: those of Neuron SDK 2.33.0 (its release notes). None: any.
PACKAGES = (
    ("torch-neuronx", "torch_neuronx", "2.13"),
    ("nki", "nki", "0.7"),
    ("neuronx-cc", "neuronxcc", None),
    ("nki-library", "nkilib", None),
)

STAND_INS = "torch_neuron_scatter_stub"

WHERE_FROM = "the AWS Neuron package index, Neuron SDK 2.33 or newer"

# What the descriptions of the empty packages of these names on PyPI say.
_PLACEHOLDER_WORDS = ("wrong package", "does not publish installable wheels to pypi")


@dataclasses.dataclass(frozen=True)
class Package:
    """name: of the distribution. version: None where unknown. state: "real", "too old", "stand-in", "placeholder", "absent"."""

    name: str
    import_name: str
    version: str | None
    state: str


def inspect_package(name, import_name, oldest=None):
    """Package `name`, imported as `import_name`, real from version `oldest` (str or None) on."""
    version, description = None, ""
    try:
        metadata = importlib.metadata.metadata(name)
        version = metadata["Version"]
        description = (metadata.get_payload() or metadata.get("Description") or "").lower()
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = _folder(import_name)
    if folder is not None and any(stand_in in (folder, *folder.parents) for stand_in in _stand_in_folders()):
        return Package(name, import_name, None, "stand-in")
    if any(words in description for words in _PLACEHOLDER_WORDS):
        return Package(name, import_name, version, "placeholder")
    if folder is None:
        return Package(name, import_name, None, "absent")
    if oldest is not None and version is not None and TorchVersion(version) < oldest:
        return Package(name, import_name, version, "too old")
    return Package(name, import_name, version, "real")


def inspect_packages():
    """Every package of PACKAGES, in that order."""
    return tuple(inspect_package(*package) for package in PACKAGES)


def _find_spec(import_name):
    try:
        return importlib.util.find_spec(import_name)
    except (ImportError, ValueError):
        return None


def _folder(import_name):
    """Where importing would load from, or None."""
    spec = _find_spec(import_name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin]
    return pathlib.Path(places[0]).resolve() if places[0] else None


def _stand_in_folders():
    spec = _find_spec(STAND_INS)
    places = () if spec is None else spec.submodule_search_locations or ()
    return [pathlib.Path(place).resolve() for place in places]
