"""Weights as a flat table of named tensors, whatever file, folder or place they come from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import QkovError

#: What the names of files of weights end in.
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")

#: A value that stands beside the tensors of a file: n_head, a loss, the name of an activation.
Plain = bool | int | float | str


class TensorFile(ABC):
    """A flat table of named tensors; no tensor is read before it is asked for.

    Attributes:
        address: the path or URL, as messages tell it.
        shapes: of every tensor by name; names of nested dictionaries are joined with dots.
        metadata: of a safetensors file.
        values: plain values beside the tensors, such as `model_args.n_head`, names joined with dots.
        config: what says the model's numbers, or None.
        config_origin: where the config stood: "config.json", "model_args in the file" and so on.
        partial: that the file is but a part of a model, in words; None where it is not.
        waits: whether reading waits for a network, so that it is worth reading what comes next meanwhile.
    """

    waits = False

    shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, address: str) -> None:
        """Begin with a table that holds nothing."""
        self.address = address
        self.shapes = {}
        self.metadata: dict[str, str] = {}
        self.values: dict[str, Plain] = {}
        self.config: dict[str, Any] | None = None
        self.config_origin: str | None = None
        self.partial: str | None = None

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers among the values."""
        return {
            name: float(value)
            for name, value in self.values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    @abstractmethod
    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of those names, on the CPU and as they are stored.

        Asked for several at once, so that one request can bring what lies side by side.

        Raises:
            QkovError: the place cannot be reached, or the file is not what its header or index says.
        """


def in_memory(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor of a model without its gradient, on the CPU.

    Raises:
        QkovError: it has no values here.
    """
    if tensor.is_meta:
        raise QkovError(
            f"{name} has no values in memory (device meta): it was not loaded, or is kept on the disk; "
            f"load the model without a device map"
        )
    if hasattr(tensor, "full_tensor"):
        raise QkovError(
            f"{name} is spread over processes (DTensor): gather it first (full_tensor), or open a checkpoint instead"
        )
    return tensor.detach().cpu()


#: What stands behind the name of a quantised weight for the factors that belong to it.
_SCALES = ("_scale_inv", "_scale")


def demand_no_adapters(names: Iterable[str], address: str) -> None:
    """QkovError where LoRA adapters lie beside the weights to which they have to be added."""
    if any(".lora_" in name for name in names):
        raise QkovError(f"{address} carries LoRA adapters beside its weights: merge them first (merge_and_unload)")


def demand_unscaled(wanted: Iterable[str], names: Iterable[str], address: str) -> None:
    """QkovError where one of the wanted tensors has scales of its own, as in files quantised to float8."""
    there = set(names)
    for name in wanted:
        scale = next((name + end for end in _SCALES if name + end in there), None)
        if scale is not None:
            raise QkovError(
                f"{name} of {address} is quantised: {scale} has its scales, and quantised weights are not read; "
                f"load the model dequantised, in bfloat16 say, and save it again"
            )
