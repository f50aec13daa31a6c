"""Which of the files in a folder are models, and which are what training or another program saved beside them."""

import re
import zipfile
from pathlib import PurePath

from ..errors import QkovError, named_input
from ..storage.places import LocalPlace, Place
from .array_file import ArrayFile
from .gguf.file import GgufFile
from .parallel.distributed_file import METADATA, DistributedCheckpoint
from .safetensors_file import SafetensorsFile
from .tensor_file import SUFFIXES, TensorFile
from .torch_file import NoTensorsError, TorchFile

#: PyTorch's oldest format is loaded whole, so that only small files of it are opened for a look.
_SMALL = 16 * 2**20
#: How many files of one family of names are opened, so that one damaged file does not decide about the others.
_LOOKS = 2
#: The extensions of files that torch.save writes.
_OF_TORCH = (".pt", ".pth", ".ckpt", ".bin")
#: Tensors that optimizers keep for each weight.
_OF_OPTIMIZERS = re.compile(
    r"(?:.*\.)?(?:exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|grad_avg|acc_delta|exp_inf)(?:\.\d+)?"
    r"|(?:.*\.)?state\.\d+\..+"
)
#: Words in the names of files that hold no model; they count where the file itself is not looked at.
_BESIDE = re.compile(r"(?<![A-Za-z])(?:optim|optimizers?|schedulers?|rng|history)(?![A-Za-z])", re.IGNORECASE)


def peek(place: Place) -> TensorFile | None:
    """Open a file of weights if that takes no more than its header, and return None otherwise.

    Raises:
        QkovError: The file cannot be read.
    """
    if place.suffix == ".safetensors":
        return SafetensorsFile(place)
    if place.name == METADATA and isinstance(place, LocalPlace):
        return DistributedCheckpoint(place)
    if place.suffix not in SUFFIXES or not isinstance(place, LocalPlace):
        return None
    if place.suffix == ".gguf":
        return GgufFile(place)
    if place.suffix in (".npy", ".npz"):
        return ArrayFile(place)
    with named_input(place, "a PyTorch file"):
        is_zipped = zipfile.is_zipfile(place.path)
    return TorchFile(place) if is_zipped or (place.size() or 0) <= _SMALL else None


def models_among(files: list[Place]) -> tuple[list[Place], dict[str, str]]:
    """Return the files that are models as far as one can see, and what each of the others is.

    Files whose names differ only in their numbers form a family. If there are several families, the first files of
    each are looked at: a family is left out if none of them can be a model. All files stay if none would be left.

    Args:
        files: The files that end as files of weights do.

    Returns:
        The models, and what is wrong with each other file, by its name.

    Raises:
        QkovError: A file cannot be reached.
    """
    families: dict[str, list[Place]] = {}
    for file in files:
        families.setdefault(re.sub(r"\d+", "#", file.name), []).append(file)
    if len(families) == 1:
        return files, {}
    others: dict[str, str] = {}
    for family in families.values():
        faults = [_fault(file) for file in family[:_LOOKS]]
        fault = faults[0]
        if fault is not None and None not in faults:
            others |= {file.name: fault for file in family}
    models = [file for file in files if file.name not in others]
    return (models, others) if models else (files, {})


def _fault(file: Place) -> str | None:
    """Return why a file is not a model, or None if it may be one; a damaged file may."""
    if file.suffix in _OF_TORCH and file.read_bytes(0, 1) not in (b"P", b"\x80", b""):
        return "is not a file of PyTorch: another program wrote it"
    named = f"is not a model by its name ({PurePath(file.name).stem})" if _BESIDE.search(file.name) else None
    try:
        opened = peek(file)
    except NoTensorsError:
        return "holds no tensors"
    except QkovError:
        return named
    if opened is None:
        return named
    matrices = [name for name, shape in opened.shapes.items() if len(shape) > 1]
    if not matrices:
        return "holds no matrices"
    if all(_OF_OPTIMIZERS.fullmatch(name) for name in matrices):
        return "holds the state of an optimizer"
    return None
