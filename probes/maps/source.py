"""Where the attention maps of a live model come from, whatever library it is of."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

#: The stack of layers and the number of the layer in it.
LayerKey = tuple[str, int]
#: What a mask is called where a model is called with one.
ENCODER_MASKS = ("attention_mask", "one_zero_attention_mask")
DECODER_MASKS = ("decoder_attention_mask",)
CROSS_MASKS = ("encoder_attention_mask",)


@dataclass(frozen=True, eq=False)
class GivenMap:
    """One layer's attention map, as the model gave it.

    Attributes:
        key: the layer.
        attention: its map; rows need not sum to 1.
        is_self: whether queries and keys are the same sequence, the queries its last positions.
        real_keys: true where a key is a token, if the layer itself was told.
    """

    key: LayerKey
    attention: Float[Tensor, "batch head query key"]
    is_self: bool = True
    real_keys: Bool[Tensor, "batch key"] | None = None


@dataclass(frozen=True, eq=False)
class GivenRows:
    """What one layer's single row of attention for each sequence measures, where there are no positions.

    Attributes:
        key: the layer.
        values: by measure, for each sequence and head; NaN where there is none.
    """

    key: LayerKey
    values: Mapping[str, Float[Tensor, "sequence head"]]


#: Takes maps, or what was measured of rows, as the layers give them.
Receiver = Callable[[GivenMap | GivenRows], None]


def layer_name(key: LayerKey) -> str:
    """Return a layer in words."""
    return f"{key[0]} layer {key[1]}".lstrip()


class MapSource(ABC):
    """A model whose maps can be had while it runs.

    Attributes:
        name: of the model, for messages.
        keys: its layers.
        called_with_masks: whether the arguments of a call say which tokens there are.
    """

    called_with_masks = True
    name: str
    keys: tuple[LayerKey, ...]

    @abstractmethod
    def attach(self, receive: Receiver) -> Iterator[Callable[[], None]]:
        """Hand every map on as it comes, and yield what ends it, hook by hook."""

    def mask_names(self, stack: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names that the masks of the queries and of the keys of a stack go by in a call."""
        if stack == "decoder" and self.has_encoder:
            return DECODER_MASKS, DECODER_MASKS
        if stack == "decoder cross":
            return DECODER_MASKS, ENCODER_MASKS
        if stack == "cross":
            return ENCODER_MASKS, CROSS_MASKS
        return ENCODER_MASKS, ENCODER_MASKS

    @property
    def has_encoder(self) -> bool:
        """Whether there is an encoder beside a decoder."""
        stacks = {stack for stack, _ in self.keys}
        return "encoder" in stacks or "decoder cross" in stacks

    def during(self) -> AbstractContextManager[None]:
        """Prepare for a call of the model, and return what has to hold while it runs."""
        return nullcontext()


def numbered(paths: Sequence[str]) -> dict[str, LayerKey]:
    """Return stack and number of modules by their paths: those of a stack differ in numbers alone.

    The name of a stack is the path without numbers; one that is alone has no name.
    """
    templates: dict[str, list[str]] = {}
    for path in paths:
        templates.setdefault(".".join(part for part in path.split(".") if not part.isdigit()), []).append(path)
    return {
        path: ("" if len(templates) == 1 else template, layer)
        for template, found in templates.items()
        for path, layer in zip(found, layer_numbers(found), strict=True)
    }


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Return the numbers of the layers that modules of one stack are in: the first in each path, else their order.

    In a model that mixes attention with other layers, these are not all there are.
    """
    found = [next((int(part) for part in path.split(".") if part.isdigit()), None) for path in paths]
    numbers = [number for number in found if number is not None]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))


#: Stack, layer and head.
HeadKey = tuple[str, int, int]
