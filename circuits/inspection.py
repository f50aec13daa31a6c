"""What is in a checkpoint, and what would be measured of it."""

from typing import Any

from .checkpoints import Checkpoint, OpenCheckpoint


def inspect_checkpoint(checkpoint: Checkpoint, opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the facts of a checkpoint as JSON can hold them; every layer's attention tensors are read once.

    Raises:
        QkovError: a tensor does not fit its layout.
    """
    layers = []
    for weights in opened.layers():
        circuits = weights.circuits()
        layers.append(
            {
                "layer": weights.layer,
                "circuits": {
                    name: {
                        "heads": circuit.shape[0],
                        "rows": circuit.shape[-2],
                        "columns": circuit.shape[-1],
                        "rank_bound": circuit.rank_bound,
                        "factorized": circuit.right is not None,
                    }
                    for name, circuit in circuits.items()
                },
            }
        )
    mapping = opened.mapping
    return {
        "path": checkpoint.address,
        "step": checkpoint.step,
        "recognised": opened.recognised,
        "tensors": len(opened.file.shapes),
        "attention_tensors": {role: mapping.full_name(name) for role, name in mapping.tensors.items()},
        "layouts": mapping.layouts,
        "rotary": mapping.rotary,
        "basis": "raw",
        "scalars": opened.scalars,
        "layers": layers,
    }
