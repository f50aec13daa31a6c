"""Open the weights that a path or address names."""

from pathlib import Path

from ..errors import CallError, QkovError
from ..storage.address import place_of
from ..storage.places import Place
from .folders import SUFFIXES, foreign_format, other_shards, weights_of
from .safetensors_file import SafetensorsFile
from .sharded_file import ShardedWeights
from .sidecars import Sidecars, read_config, sidecars_of, training_values
from .tensor_file import TensorFile
from .torch_file import TorchFile


def open_weights(address: Path | str | Place, trust_pickle: bool = False) -> TensorFile:
    """Open a file of weights, an index of several, or the folder of a model; on this machine or anywhere.

    Args:
        address: a path, an fsspec address, a hub id `organisation/model@revision`, or a place.
        trust_pickle: let PyTorch files run the code that they name. Only for files whose origin is known.

    Raises:
        CallError: there is no such thing, or it is of no kind that holds weights.
        QkovError: the weights cannot be read.
    """
    place = place_of(address)
    weights = weights_at(place)
    file = _open(weights, trust_pickle)
    file.partial = other_shards(weights.name)
    sidecars = Sidecars(None, None) if weights.parent is None else sidecars_of(weights.parent, weights.name)
    if sidecars.config is not None:
        file.config, file.config_origin = read_config(sidecars.config), sidecars.config.name
    if sidecars.trainer_state is not None:
        file.values |= training_values(read_config(sidecars.trainer_state), sidecars.trainer_state)
    return file


def weights_at(place: Place) -> Place:
    """Return the file or index of the weights: the place itself, or what its folder holds.

    Raises:
        CallError: there is no such thing.
        QkovError: the folder holds no weights that can be read.
    """
    if place.is_folder():
        return weights_of(place)
    if not place.is_file():
        raise CallError(
            f"{place} is not a file and not a folder; expected a file that ends in {', '.join(SUFFIXES)}, or a folder"
        )
    return place


def _open(place: Place, trust_pickle: bool) -> TensorFile:
    if place.name.endswith(".index.json"):
        return ShardedWeights(place, trust_pickle)
    foreign = foreign_format(place.name)
    if foreign is not None:
        raise CallError(f"{place} holds {foreign}")
    if place.suffix not in SUFFIXES:
        raise CallError(f"{place} ends in {place.suffix or 'nothing'}; expected one of {', '.join(SUFFIXES)}")
    if place.size() == 0:
        raise QkovError(f"{place} is empty: it was cut short; copy it again")
    return SafetensorsFile(place) if place.suffix == ".safetensors" else TorchFile(place, trust_pickle)
