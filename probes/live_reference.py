"""The weights that a run in training is compared with, kept in its store, so that going on does not change them."""

from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ..analyses.trajectories.layers_in_memory import LayersInMemory
from ..circuits.atomic_write import write_atomically
from ..circuits.attention_weights import BIASES, NAMES
from ..circuits.errors import QkovError

_NAME = "reference.safetensors"


def keep_reference(folder: Path, layers: LayersInMemory) -> None:
    """Write the weights and biases of layers into a store, whole or not at all."""
    tensors = {
        f"{weights.stack}/{weights.layer}/{name}": tensor.contiguous()
        for weights in layers.layers()
        for name in (*NAMES, *BIASES)
        if (tensor := getattr(weights, name)) is not None
    }
    write_atomically(folder / _NAME, save(tensors))


def kept_reference(folder: Path, layers: LayersInMemory) -> LayersInMemory:
    """Return the layers with the weights and biases that the store keeps.

    Raises:
        QkovError: the store has no such weights, or they are of another model.
    """
    try:
        tensors = load_file(folder / _NAME)
    except (OSError, SafetensorError) as error:
        raise QkovError(
            f"{folder / _NAME}, with which the run is compared, is missing or damaged: give another folder"
        ) from error
    held = []
    for weights in layers.layers():
        now = {name: tensor for name in (*NAMES, *BIASES) if (tensor := getattr(weights, name)) is not None}
        kept = {name: tensors.get(f"{weights.stack}/{weights.layer}/{name}") for name in now}
        for name, tensor in kept.items():
            if tensor is None or tensor.shape != now[name].shape:
                found = "none" if tensor is None else f"one of shape {list(tensor.shape)}"
                raise QkovError(
                    f"the model has a {name} of shape {list(now[name].shape)} in {weights.place}, and the store "
                    f"{folder} was begun with {found}: give another folder"
                )
        held.append(replace(weights, **kept))
    return LayersInMemory(tuple(held))
