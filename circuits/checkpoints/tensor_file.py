"""Weights as a flat table of named tensors, whatever file, folder or address they come from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import QkovError

#: The extensions of files of arrays, which hold other things as often as weights.
ARRAYS = (".npy", ".npz", ".pkl", ".pickle")
#: The extensions of files of weights.
SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".gguf", *ARRAYS)

#: A value beside the tensors of a file: n_head, a loss, the name of an activation.
Plain = bool | int | float | str


class TensorFile(ABC):
    """A flat table of named tensors; no tensor is read before it is requested.

    Attributes:
        address: The path or URL, as it appears in messages.
        shapes: The shape of every tensor by name; names of nested dictionaries are joined with dots.
        metadata: The metadata of a safetensors file.
        values: Plain values beside the tensors, such as `model_args.n_head`, with names joined by dots.
        lists: Lists of plain values, such as `epochs`, with names joined by dots.
        collections: The keys of each list, and of each dictionary keyed by numbers, whose members hold tensors. The
            tensors of a member are named with its key, as in `checkpoints.0.weight`.
        containers: The entries of the file itself that are containers with tensors, such as `model` and `optimizer`.
        unread: What is in the file and is not read, with the reason.
        training: What the trainer's state beside the weights says: `global_step`, `loss` and `learning_rate`.
        config: The model's dimensions and settings, or None.
        config_origin: Where the config was found: "config.json", "model_args in the file" and so on.
        open_facts: The names of the facts about attention that the file leaves open beside its config, and the reason,
            by what it has or lacks.
        partial: A sentence that says so if the file is only a part of a model, or None.
        waits: Whether reading waits for a network, so that it pays to read the next tensors in the meantime.
    """

    waits = False

    shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, address: str) -> None:
        """Start with an empty table."""
        self.address = address
        self.shapes = {}
        self.metadata: dict[str, str] = {}
        self.values: dict[str, Plain] = {}
        self.lists: dict[str, tuple[Plain, ...]] = {}
        self.collections: dict[str, tuple[Any, ...]] = {}
        self.containers: tuple[str, ...] = ()
        self.unread: dict[str, str] = {}
        self.training: dict[str, int | float] = {}
        self.config: dict[str, Any] | None = None
        self.config_origin: str | None = None
        self.open_facts: dict[str, tuple[tuple[str, ...], str]] = {}
        self.partial: str | None = None

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers among the values."""
        return {
            name: float(value)
            for name, value in self.values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def take_facts(self, file: "TensorFile") -> None:
        """Take everything but the tensors from another file, of which this one is a view."""
        self.metadata, self.values, self.lists = file.metadata, file.values, file.lists
        self.collections, self.unread, self.training = file.collections, file.unread, file.training
        self.containers = file.containers
        self.waits, self.partial, self.open_facts = file.waits, file.partial, file.open_facts
        self.config, self.config_origin = file.config, file.config_origin

    def take_config(self, table: dict[str, Any], origin: str) -> None:
        """Take a config that was found beside the file.

        Args:
            table: The config.
            origin: Where it was found.
        """
        self.config, self.config_origin = table, origin

    @abstractmethod
    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names, on the CPU and as they are stored.

        Several tensors are requested at once, so that one request can cover those that are next to each other.

        Raises:
            QkovError: The file cannot be reached, or does not match its header or index.
        """


def in_memory(tensor: Tensor, name: str) -> Tensor:
    """Return a model's tensor without its gradient, on the CPU.

    Args:
        tensor: The tensor.
        name: Its name, for messages.

    Raises:
        QkovError: The tensor has no values in memory, or is distributed over processes.
    """
    if tensor.is_meta:
        raise QkovError(
            f"{name} has no values in memory (device meta): it was not loaded, or was offloaded to disk; "
            f"load the model without a device map"
        )
    if hasattr(tensor, "full_tensor"):
        raise QkovError(
            f"{name} is distributed over processes (DTensor): a CircuitProbe gathers it while the model is trained; "
            f"elsewhere gather it first (full_tensor), or open a checkpoint"
        )
    return tensor.detach().cpu()


def demand_no_adapters(names: Iterable[str], address: str) -> None:
    """Refuse weights with adapters beside them, such as LoRA's, which have to be added to the weights first.

    Args:
        names: The names of the tensors.
        address: Where they were found, for the message.

    Raises:
        QkovError: A name is that of an adapter.
    """
    other = next((name for name in names if ".base_layer." in name and ".lora_" not in name), None)
    if any(".lora_" in name for name in names):
        raise QkovError(f"{address} holds LoRA adapters beside its weights; merge them first (merge_and_unload)")
    if other is not None:
        raise QkovError(
            f"{address} holds the weights of a model with adapters of PEFT, such as {other}; merge them first"
        )
