"""Files written by torch.save, loaded without running code."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import QkovError, reason
from ..storage.places import Place
from .tensor_file import TensorFile, in_memory

#: Dictionaries in which training scripts save the model's dimensions; the first one that is found counts.
CONFIGS = ("model_args", "model_config", "config", "cfg", "hyper_parameters")


class TorchFile(TensorFile):
    """A file written by torch.save, with its tensors mapped from the disk to the CPU."""

    def __init__(self, place: Place, trust_pickle: bool = False) -> None:
        """Open the file; a remote file is copied to this machine first, and the copy is removed once it is open.

        Args:
            place: The place of the file.
            trust_pickle: Let the file run the code that it names. Only for files whose origin is known.

        Raises:
            QkovError: The file is not a PyTorch file, was cut short, or wants to run code.
        """
        super().__init__(place.address)
        self._place, self._version = place, place.version()
        self._tensors: dict[str, Tensor] = {}
        with place.local_copy() as path:
            loaded = _load(path, place.address, trust_pickle)
        if isinstance(loaded, nn.Module):
            loaded = loaded.state_dict()
        if not isinstance(loaded, Dictionary):
            raise QkovError(
                f"{place} holds a {type(loaded).__name__}; expected a dictionary of tensors, such as a state dict"
            )
        try:
            self._flatten(loaded, "")
        except RecursionError as error:
            raise QkovError(f"{place} holds dictionaries that hold themselves; expected a state dict") from error
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.config, self.config_origin = _config(loaded)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names; sparse tensors are filled with zeros.

        Raises:
            QkovError: A tensor was saved without its values, or the file was written again since it was opened.
        """
        # A mapped tensor changes with the file, and reading one whose file was cut short kills the process.
        self._place.demand_version(self._version)
        mapped = {name: in_memory(self._tensors[name], f"{name} of {self.address}") for name in names}
        read = {
            name: tensor.clone() if tensor.layout is torch.strided else tensor.to_dense()
            for name, tensor in mapped.items()
        }
        self._place.demand_version(self._version)
        return read

    def _flatten(self, nested: Dictionary[Any, Any], prefix: str) -> None:
        for key, value in nested.items():
            name = f"{prefix}{key}"
            if isinstance(value, Tensor):
                self._tensors[name] = value
            elif isinstance(value, Dictionary):
                self._flatten(value, f"{name}.")
            elif isinstance(value, (bool, int, float, str)):
                self.values[name] = value


def _config(loaded: Dictionary[Any, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the plain values of the first dictionary that states the model's dimensions, and where it was found."""
    for name in CONFIGS:
        if isinstance(loaded.get(name), Dictionary):
            plain = (bool, int, float, str, list, tuple, dict, type(None))
            return {str(key): value for key, value in loaded[name].items() if isinstance(value, plain)}, (
                f"{name} in the file"
            )
    return None, None


def _load(path: Path, address: str, trust_pickle: bool) -> Any:
    zipped = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        pickled = file.read(1) == b"\x80"
    if not zipped and not pickled:
        raise QkovError(
            f"{address} is not a PyTorch file: it is neither a zip archive nor a pickle, or it was cut short"
        )
    try:
        with warnings.catch_warnings():
            # What torch warns about in a foreign pickle is also raised as an error, which is reported below.
            warnings.simplefilter("ignore")
            # Files saved on another device (mps, cuda) open only if they are mapped to the CPU.
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle, mmap=zipped)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise QkovError(
                f"{address} wants to run code while it loads ({_named_global(str(error))}), which is refused; "
                f"if you know the origin of the file, allow it with --trust-pickle (trust_pickle=True)"
            ) from error
        raise QkovError(f"{address} cannot be unpickled: it was cut short, or torch.save did not write it") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError, OSError) as error:
        raise QkovError(f"{address} cannot be read as a PyTorch file ({reason(error)}): was it cut short?") from error


def _named_global(message: str) -> str:
    words = message.split("GLOBAL", 1)[1].split()
    return f"it names {words[0].strip('`:,.')}"
