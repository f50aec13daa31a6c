"""The checkpoints that qkov's own training saves: safetensors with TransformerLens' names and metadata."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..architectures.mapping import Mapping
from ..architectures.named_layouts import LAYOUTS, TARGETS
from ..checkpoints.tensor_file import TensorFile
from ..errors import QkovError, named_input
from ..storage.atomic_write import write_atomically
from ..visible_text import visible
from ..weights.attention_weights import NAMES, AttentionWeights

FORMAT = "qkov checkpoint 1"
_KEY = "qkov"


def save_checkpoint(
    folder: Path, step: int, layers: list[AttentionWeights], scalars: dict[str, float], settings: dict[str, Any]
) -> Path:
    """Write step_000000123.safetensors into the folder, completely or not at all, and return its path.

    Args:
        folder: The folder of the run.
        step: Number of steps taken.
        layers: The weights: factors or collapsed circuits.
        scalars: Values at this step, such as loss and time.
        settings: Settings of the run, such as seed, ratio and parameterization, in a form that JSON can hold.
    """
    tensors: dict[str, Tensor] = {}
    for weights in layers:
        for name in NAMES:
            tensor = getattr(weights, name)
            if tensor is not None:
                tensors[f"blocks.{weights.layer}.attn.{name}"] = tensor.detach().clone(
                    memory_format=torch.contiguous_format
                )
    # A single entry, because safetensors writes several in no fixed order and equal runs should give equal bytes.
    metadata = {_KEY: json.dumps({"format": FORMAT, "step": step, "scalars": scalars, "settings": settings})}
    path = folder / f"step_{step:09d}.safetensors"
    write_atomically(path, save(tensors, metadata=metadata))
    return path


def is_own(file: TensorFile) -> bool:
    """Return whether qkov saved the file."""
    return FORMAT in file.metadata.get(_KEY, "")


def own_mapping(file: TensorFile) -> Mapping:
    """Return the mapping of a file that qkov saved, which holds factors or collapsed circuits.

    Raises:
        QkovError: The file holds a tensor that no such file has.
    """
    foreign = next((name for name in file.shapes if name.rpartition(".W_")[2] not in TARGETS), None)
    if foreign is not None:
        raise QkovError(f"{file.address} claims to be a {FORMAT!r}, but holds {foreign}; say what it is in a mapping")
    roles = {name.rpartition(".W_")[2] for name in file.shapes}
    return Mapping(
        tensors={role: f"blocks.{{layer}}.attn.W_{role}" for role in sorted(roles)},
        layouts={role: LAYOUTS["transformer_lens"][role] for role in roles},
        origin="qkov's own format",
    )


def own_scalars(file: TensorFile) -> dict[str, float]:
    """Return the numbers that were saved with the weights.

    Raises:
        QkovError: The metadata is damaged.
    """
    with named_input(f"the metadata of {file.address}", f"the scalars of a {FORMAT!r}"):
        scalars = json.loads(file.metadata[_KEY])["scalars"]
        return {visible(name): float(value) for name, value in scalars.items()}


def own_settings(file: TensorFile) -> dict[str, Any]:
    """Return the settings of the run that were saved with the weights.

    Raises:
        QkovError: The metadata is damaged.
    """
    with named_input(f"the metadata of {file.address}", f"the settings of a {FORMAT!r}"):
        return dict(json.loads(file.metadata[_KEY])["settings"])
