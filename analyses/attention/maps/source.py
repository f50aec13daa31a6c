"""The interface of every source of attention maps: the layers of a live model, and a hook for each of them.

A source is made for one model and serves two readers. A probe watches calls that the user makes: it sees each map, and
what the model computes and returns stays the same to the bit. A measure makes the call itself and consumes the maps:
gradients reach them, and each is freed as soon as it has been read, so that the maps of all layers are never held.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ....circuits.weights.layer_keys import LayerKey, layer_name
from ...dynamics.sequences import Sequences
from ..kernels.scores import KernelCall
from .calls import OnCall, on_call
from .columns import NOT_SAID, Columns, Unknown
from .modes import EVALUATION, Mode


@dataclass(frozen=True, eq=False)
class LayerOverPositions(ABC):
    """A layer whose queries and keys are positions: its map, or what the map can be computed from.

    Attributes:
        key: The layer.
        is_self: Whether queries and keys are the same sequence.
        columns: The columns of the sequence that they stand in, where queries and keys are the same sequence.
        seen: Returns where a query can see a key, from the mask that the layer was called with; None if that is not
            known. Layers that share a mask share the tensor.
        real_keys: True where a key is a token, if the layer itself was called with a padding mask.
        mode: The mode that the layer ran in, and in training mode what its dropout did to the map.
    """

    key: LayerKey
    _: KW_ONLY
    is_self: bool = True
    columns: Columns | Unknown = NOT_SAID
    seen: Callable[[], Bool[Tensor, "#batch #query key"] | None] = lambda: None
    real_keys: Bool[Tensor, "batch key"] | None = None
    mode: Mode = EVALUATION

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the map, [batch, head, query, key]."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the map."""


@dataclass(frozen=True, eq=False)
class LayerMap(LayerOverPositions):
    """The attention map of one layer, as the model computed it.

    Attributes:
        attention: The map; rows need not sum to 1.
    """

    attention: Float[Tensor, "batch head query key"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the map."""
        return tuple(self.attention.shape)

    @property
    def device(self) -> torch.device:
        """The device of the map."""
        return self.attention.device


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The attention of a layer that has one query for each sequence and no positions.

    Attributes:
        key: The layer.
        attention: The attention on each entry of the vocabulary.
        sequences: How often each entry occurs in each sequence, and which entries are relevant.
    """

    key: LayerKey
    attention: Float[Tensor, "head sequence entry"]
    sequences: Sequences


@dataclass(frozen=True, eq=False)
class LayerScores(LayerOverPositions):
    """What a layer's fused kernel was called with, in place of a map.

    Attributes:
        call: The call, which gives the weights before dropout.
    """

    call: KernelCall

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the map that the call stands for."""
        return self.call.shape

    @property
    def device(self) -> torch.device:
        """The device of the queries."""
        return self.call.query.device


#: What is read of a layer.
LayerReading = LayerMap | LayerRows | LayerScores
#: Takes the map of each layer, or its rows, or the call of its kernel, as soon as the layer has run.
Receiver = Callable[[LayerReading], None]
#: Takes a layer and what its queries, keys and values read, after the norm.
InputReceiver = Callable[[LayerKey, Float[Tensor, "batch position d_model"]], None]


class MapSource(ABC):
    """The layers of a model whose attention maps can be read while the model runs.

    Attributes:
        name: The model's class, for messages.
        keys: The layers of attention, stack by stack.
        masks_in_call: Whether the arguments of the model's call say which positions are tokens; otherwise the layers
            themselves are told.
        positions_first: Whether layers read [position, batch, d_model].
        has_maps: Whether the layers have maps over positions; otherwise each has one row for a sequence.
        hook_points: The hook point that the map of each layer passes, by name, in models with TransformerLens' hooks.
    """

    masks_in_call: ClassVar[bool] = True
    has_maps: ClassVar[bool] = True
    positions_first: bool = False
    hook_points: Mapping[LayerKey, str] = MappingProxyType({})
    name: str
    keys: tuple[LayerKey, ...]

    @abstractmethod
    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Register the hooks one by one, and yield what removes each of them.

        Args:
            receive: Called with each layer's map as soon as the layer has run.
            inputs: Called with what each layer reads, before `receive` is called with the layer's map.
            consume: Whether the caller is the only one who reads the maps. Each map is then the tensor that the model
                computes with, so that gradients reach it, and it is taken out of what the module returns, so that
                nothing else keeps it. Otherwise what the modules compute and return is left as it is.
            on_call: Registers a hook on a module; a probe has a way of its own for the model itself.
        """

    def layer_name(self, key: LayerKey) -> str:
        """Return a layer as messages name it: by its hook point, or else by its stack and number."""
        return self.hook_points.get(key) or layer_name(*key)

    def demand_readable(self) -> None:  # noqa: B027 (most sources always have maps)
        """Refuse a model that gives neither maps, as it is set now, nor the calls of a kernel.

        Raises:
            CallError: The attention is fused in a way that cannot be read; the message says how to change that.
        """

    @property
    def gives_scores(self) -> bool:
        """Whether a layer gives, as the model is set now, the call of its kernel in place of a map."""
        return False

    def called_apart(self) -> nn.Module | None:
        """Return the part that a library calls by itself before it calls the model; None if there is none."""
        return None

    def during(self) -> AbstractContextManager[None]:
        """Prepare for a call of the model, and return the context in which the model has to run."""
        return nullcontext()
