"""Open the weights at a path or address."""

from pathlib import Path
from weakref import WeakValueDictionary

from ..errors import CallError, QkovError
from ..storage.address import place_of
from ..storage.places import Place
from .array_file import ArrayFile
from .files import CheckpointFiles, files_at
from .gguf.file import GgufFile
from .parallel.distributed_file import METADATA, DistributedCheckpoint
from .parallel.joined_files import JoinedFiles
from .refusals import foreign_format, partial_weights
from .safetensors_file import SafetensorsFile
from .series import element_of
from .sharded_file import ShardedWeights
from .sidecars import LOGGED, read_config, training_values
from .tensor_file import SUFFIXES, TensorFile
from .torch_file import TorchFile

#: What the model's dimensions are called in a file beside the weights that also says where training stood.
_INNER = "model_config"
#: The files of several checkpoints that are open, so that the next checkpoint in one does not open it again.
_CONTAINERS: WeakValueDictionary[tuple[str, tuple[int, ...] | None, bool], TensorFile] = WeakValueDictionary()


def open_weights(address: Path | str | Place | CheckpointFiles, trust_pickle: bool = False) -> TensorFile:
    """Open a file of weights, an index of several files, or a model's folder, local or remote.

    Args:
        address: A path, an fsspec address, a hub id `organisation/model@revision`, a place, or the files of a
            checkpoint that were found already.
        trust_pickle: Let PyTorch files run the code that they name. Only for files whose origin is known.

    Returns:
        The tensors of the file by name, with the config and the training values found beside it.

    Raises:
        CallError: There is nothing at the address, or it is not a kind of file that holds weights.
        QkovError: The weights cannot be read.
    """
    files = address if isinstance(address, CheckpointFiles) else files_at(place_of(address))
    if files.element:
        file = element_of(_container(files.weights, trust_pickle), files.element)
    else:
        file = _open(files.weights, trust_pickle) if not files.parts else _joined(files, trust_pickle)
    file.partial = partial_weights(files.weights.name) or file.partial
    if files.config is not None:
        table = read_config(files.config)
        file.take_config(table, files.config.name)
        if isinstance(table.get(_INNER), dict):
            file.config, file.config_origin = table[_INNER], f"{_INNER} in {files.config.name}"
            plain = {name: value for name, value in table.items() if isinstance(value, (bool, int, float, str))}
            file.values = plain | file.values
    if files.trainer_state is not None:
        file.training = training_values(read_config(files.trainer_state), files.trainer_state)
        file.values |= {name: value for name, value in file.training.items() if name in LOGGED}
    return file


def _container(place: Place, trust_pickle: bool) -> TensorFile:
    """Return the open file that holds several checkpoints; it stays open as long as one of them does."""
    key = (place.address, place.version(), trust_pickle)
    container = _CONTAINERS.get(key) if key[1] is not None else None
    if container is None:
        container = _open(place, trust_pickle)
        if key[1] is not None:
            _CONTAINERS[key] = container
    return container


def _joined(files: CheckpointFiles, trust_pickle: bool) -> TensorFile:
    opened = {part: _open(place, trust_pickle) for part, place in files.parts}
    return JoinedFiles(f"{files.weights.address} and {len(opened) - 1} more", opened)


def _open(place: Place, trust_pickle: bool) -> TensorFile:
    if place.name == METADATA:
        return DistributedCheckpoint(place)
    if place.name.endswith(".index.json"):
        return ShardedWeights(place, trust_pickle)
    foreign = foreign_format(place.name)
    if foreign is not None:
        raise CallError(f"{place} holds {foreign}")
    if place.suffix not in SUFFIXES:
        raise CallError(f"{place} ends in {place.suffix or 'nothing'}; expected one of {', '.join(SUFFIXES)}")
    if place.size() == 0:
        raise QkovError(f"{place} is empty, so it was cut short; copy it again")
    if place.suffix == ".safetensors":
        return SafetensorsFile(place)
    if place.suffix == ".gguf":
        return GgufFile(place)
    return ArrayFile(place) if place.suffix in (".npy", ".npz") else TorchFile(place, trust_pickle)
