"""Safetensors and PyTorch files as flat tables of named tensors, nothing read before it is asked for."""

import hashlib
import pickle
import warnings
import zipfile
from collections.abc import Mapping as Dictionary
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .errors import CallError, QkovError

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


class SafetensorsFile:
    """A safetensors file: the header is read at once, a tensor when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            QkovError: the file is no safetensors file, or is cut short.
        """
        self.path = path
        try:
            with safe_open(path, framework="pt") as handle:
                self.metadata = dict(handle.metadata() or {})
                self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise QkovError(
                f"{path} cannot be read as safetensors ({error}): it is cut short or is another kind of file; "
                f"copy it again"
            ) from error
        self.scalars: dict[str, float] = {}

    def read(self, name: str) -> Tensor:
        """Return the tensor of that name."""
        with safe_open(self.path, framework="pt") as handle:
            return handle.get_tensor(name)


class TorchFile:
    """A file written by torch.save, loaded without running code, its tensors mapped from the disk to the CPU."""

    def __init__(self, path: Path, trust_pickle: bool = False) -> None:
        """Open the file.

        Args:
            path: of the file.
            trust_pickle: let the file run the code that it names. Only for files whose origin is known.

        Raises:
            QkovError: the file is no PyTorch file, is cut short, or wants to run code.
        """
        self.path = path
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        self.scalars: dict[str, float] = {}
        loaded = _load(path, trust_pickle)
        if isinstance(loaded, nn.Module):
            loaded = loaded.state_dict()
        if not isinstance(loaded, Dictionary):
            raise QkovError(
                f"{path} holds a {type(loaded).__name__}; expected a dictionary of tensors, such as a state dict"
            )
        self._flatten(loaded, "")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return the tensor of that name."""
        return self._tensors[name].detach()

    def _flatten(self, nested: Dictionary[Any, Any], prefix: str) -> None:
        for key, value in nested.items():
            name = f"{prefix}{key}"
            if isinstance(value, Tensor):
                self._tensors[name] = value
            elif isinstance(value, Dictionary):
                self._flatten(value, f"{name}.")
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                self.scalars[name] = float(value)


#: Either kind: `shapes` of its tensors and its `scalars` by name (names of nested dictionaries joined with dots),
#: `metadata`.
TensorFile = SafetensorsFile | TorchFile


def open_tensor_file(path: Path, trust_pickle: bool = False) -> TensorFile:
    """Open a safetensors or PyTorch file by its suffix.

    Raises:
        CallError: there is no such file, or its suffix is none of the known ones.
        QkovError: the file cannot be read.
    """
    if not path.is_file():
        raise CallError(f"{path} is not a file; expected one that ends in {', '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise CallError(f"{path} ends in {path.suffix or 'nothing'}; expected one of {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise QkovError(f"{path} is empty: it was cut short; copy it again")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path, trust_pickle)


def fingerprint(path: Path) -> str:
    """Return a hash of a file's size, of the time it was last written, and of its first and last 64 KiB.

    Two reads, whatever the file's size. A file that was written again is taken for another one, were it the same.
    """
    block = 65536
    status = path.stat()
    digest = hashlib.blake2b(f"{status.st_size} {status.st_mtime_ns}".encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(block))
        file.seek(max(0, status.st_size - block))
        digest.update(file.read(block))
    return digest.hexdigest()


def _load(path: Path, trust_pickle: bool) -> Any:
    zipped = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        pickled = file.read(1) == b"\x80"
    if not zipped and not pickled:
        raise QkovError(f"{path} is no PyTorch file: it is neither a zip archive nor a pickle, or it was cut short")
    try:
        with warnings.catch_warnings():
            # What torch warns of in a foreign pickle comes as an error as well, and that one is told below.
            warnings.simplefilter("ignore")
            # Files saved on another device (mps, cuda) open only when mapped to the CPU.
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle, mmap=zipped)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise QkovError(
                f"{path} wants to run code while it loads ({_named_global(str(error))}), which is refused; "
                f"if you know where the file comes from, allow it with --trust-pickle (trust_pickle=True)"
            ) from error
        raise QkovError(f"{path} cannot be unpickled: it was cut short, or torch.save did not write it") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise QkovError(f"{path} cannot be read as a PyTorch file ({first_line}): was it cut short?") from error


def _named_global(message: str) -> str:
    words = message.split("GLOBAL", 1)[1].split()
    return f"it names {words[0].strip('`:,.')}"
