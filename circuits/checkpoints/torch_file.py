"""Files written by torch.save, and other pickles, read without running code."""

import re
import warnings
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import QkovError, reason
from ..storage.places import Place
from .pickles.archives import Loaded, load_archive
from .pickles.contents import contents_of, is_module
from .pickles.module_config import config_of
from .pickles.placeholders import DamagedError, Placeholder
from .pickles.plain import as_plain
from .tensor_file import TensorFile

#: Dictionaries in which training scripts save the model's dimensions; the first one that is found counts.
CONFIGS = ("model_args", "model_config", "config", "cfg", "hyper_parameters", "hparams", "args")


class NoTensorsError(QkovError):
    """A file that can be read holds no tensor."""


class TorchFile(TensorFile):
    """A file written by torch.save, or another pickle, whose tensors stay on the disk until they are read."""

    def __init__(self, place: Place, trust_pickle: bool = False) -> None:
        """Open the file; a remote file is copied to this machine first, and the copy is removed once it is open.

        Args:
            place: The place of the file.
            trust_pickle: Let the file run the code that it names. Only for files whose origin is known.

        Raises:
            QkovError: The file is not a PyTorch file, was cut short, or holds nothing but objects that only its code
                could build.
        """
        super().__init__(place.address)
        self._place, self._version = place, place.version()
        with place.local_copy() as path:
            loaded = _load(path, place.address, trust_pickle)
        try:
            contents = contents_of(loaded.content, loaded.described_by, loaded.size)
            self.config, self.config_origin = _config(loaded.content, loaded.described_by, place.address)
        except (DamagedError, RecursionError) as error:
            raise QkovError(f"{_sentence(place, reason(error))}; expected a state dict") from error
        self._tensors = contents.tensors
        self.values, self.lists = contents.values, contents.lists
        self.collections, self.unread = contents.collections, contents.unread
        self.containers = tuple(contents.containers)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        if not self.shapes and not (self.values and isinstance(loaded.content, Dictionary)):
            raise _nothing_in(loaded.content, self.unread, place)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names; sparse tensors are filled with zeros.

        Raises:
            QkovError: A tensor was saved without its values, or the file was written again since it was opened.
        """
        # A mapped tensor changes with the file, and reading one whose file was cut short kills the process.
        self._place.demand_version(self._version)
        read = {name: self._tensors[name].read(f"{name} of {self.address}") for name in names}
        self._place.demand_version(self._version)
        return read


def _sentence(place: Place, why: str) -> str:
    return f"{place} {why.removeprefix('it ')}" if why.startswith("it ") else f"{place} cannot be read: {why}"


def _nothing_in(loaded: Any, unread: Dictionary[str, str], place: Place) -> QkovError:
    if not unread:
        return NoTensorsError(
            f"{place} holds a {type(loaded).__name__} without tensors; expected a dictionary of tensors, such as a "
            f"state dict"
        )
    name, why = next(iter(unread.items()))
    return QkovError(
        f"{place} holds no tensor, and wants to run code while it loads ({name} is {why}), which is refused; if you "
        f"know the origin of the file, allow it with --trust-pickle (trust_pickle=True)"
    )


def _config(loaded: Any, described_by: int, address: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the values of the first dictionary that states the model's dimensions, and where it was found."""
    if not isinstance(loaded, (Dictionary, nn.Module, Placeholder)):
        return None, None
    members = loaded if isinstance(loaded, Dictionary) else {"": loaded}
    modules = [value for value in members.values() if is_module(value)]
    if len(modules) == 1:
        (module,) = modules
        named = (module.name if isinstance(module, Placeholder) else type(module).__name__).rpartition(".")[2]
        if isinstance(module, Placeholder):
            config = as_plain(module.attributes.get("config"), described_by)
        else:
            config = config_of(module, address)
        if isinstance(config, dict):
            return config, f"the config of the pickled {named}"
    for name in CONFIGS:
        config = as_plain(members.get(name), described_by)
        if isinstance(config, dict):
            return config, f"{name} in the file"
    return None, None


def _load(path: Path, address: str, trust_pickle: bool) -> Loaded:
    try:
        if not trust_pickle:
            return load_archive(path)
        size = path.stat().st_size
        return Loaded(_run(path), size, size)
    except DamagedError as error:
        if not _looks_like_torch(path):
            raise QkovError(
                f"{address} is not a PyTorch file: it is neither a zip archive nor a pickle, or it was cut short"
            ) from error
        raise QkovError(
            f"{address} cannot be read as a PyTorch file or a pickle ({reason(error)}): it was cut short, or is "
            f"another kind of file"
        ) from error
    except Exception as error:  # code that the file runs, and damaged files, raise errors of any kind
        missing = _missing_class(error)
        if missing is not None:
            raise QkovError(
                f"{address} needs {missing}, which is not installed here: install it, or open the file without "
                f"--trust-pickle, which reads the tensors alone"
            ) from error
        raise QkovError(f"{address} cannot be read as a PyTorch file ({reason(error)}): was it cut short?") from error


def _looks_like_torch(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (b"PK", *(bytes((0x80, protocol)) for protocol in range(2, 6)))


def _run(path: Path) -> Any:
    """Load a file with torch, which runs the code that the file names."""
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    with warnings.catch_warnings():
        # What torch warns about in a foreign pickle is also raised as an error, which is reported.
        warnings.simplefilter("ignore")
        # Files saved on another device (mps, cuda) open only if they are mapped to the CPU.
        return torch.load(path, map_location="cpu", weights_only=False, mmap=zipped)


def _missing_class(error: Exception) -> str | None:
    """Return the module or class that a file needs and that is not installed, or None for any other error."""
    if isinstance(error, ModuleNotFoundError):
        return f"the module {error.name}"
    if isinstance(error, (AttributeError, ImportError)):
        found = re.search(r"(?:attribute|name) '([^']+)' (?:on|from) (?:<module )?'([^']+)'", str(error))
        return None if found is None else f"the class {found[2]}.{found[1]}"
    return None
