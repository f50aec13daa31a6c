"""What a call of a model says about its tokens: their ids, what is padding, and their positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from ...analyses.attention.maps.source import LayerOverPositions, MapSource
from ...circuits.errors import CallError

_TOKEN_NAMES = ("input_ids", "input", "tokens", "decoder_input_ids")
#: The names that padding masks have where a model is called with them.
_ENCODER_MASKS = ("attention_mask", "one_zero_attention_mask")
_DECODER_MASKS = ("decoder_attention_mask",)
_CROSS_MASKS = ("encoder_attention_mask",)
#: All of them.
PADDING_MASKS = (*_ENCODER_MASKS, *_CROSS_MASKS, *_DECODER_MASKS)


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of a model.

    Attributes:
        source: The source of the model's maps.
        arguments: The arguments that the model was called with, by name.
        earlier: The tokens of the call before; None if there was none.
    """

    source: MapSource
    arguments: Mapping[str, Any]
    earlier: Tensor | None = None

    @property
    def tokens(self) -> Tensor | None:
        """The tokens: the argument with one of the usual names, or else the first tensor."""
        named = [self.arguments[name] for name in _TOKEN_NAMES if name in self.arguments]
        return next((value for value in [*named, *self.arguments.values()] if isinstance(value, Tensor)), None)

    def is_decoder(self, layer_map: LayerOverPositions) -> bool:
        """Return whether a map is one of a decoder's self-attention, beside an encoder."""
        stacks = {stack for stack, _ in self.source.keys}
        return layer_map.key[0] == "decoder" and not stacks.isdisjoint({"encoder", "decoder cross"})

    def key_mask(self, layer_map: LayerOverPositions) -> Any:
        """Return the mask of a map's keys that the model was called with; None if there is none."""
        if self.is_decoder(layer_map):
            return self._mask(_DECODER_MASKS)
        return self._mask(_CROSS_MASKS if layer_map.key[0] == "cross" else _ENCODER_MASKS)

    def query_mask(self, layer_map: LayerOverPositions) -> Any:
        """Return the mask of a map's queries, where the keys are of another sequence; None if there is none."""
        return self._mask(_DECODER_MASKS if layer_map.key[0] == "decoder cross" else _ENCODER_MASKS)

    def _mask(self, names: Sequence[str]) -> Any:
        if not self.source.masks_in_call:
            return None
        return next((self.arguments[name] for name in names if self.arguments.get(name) is not None), None)

    def position_ids(self, layer_map: LayerOverPositions) -> Int[Tensor, "batch query"] | None:
        """Return the positions of a map's queries in their sequences, if the call has them in one dimension."""
        batch, _, queries, _ = layer_map.shape
        ids = self.arguments.get("decoder_position_ids" if self.is_decoder(layer_map) else "position_ids")
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            return None
        # Models of text and images give a row of positions in the text before those in the image.
        ids = ids[0] if ids.ndim == 3 and ids.shape == (4, batch, queries) else ids
        fits = ids.ndim in (1, 2) and ids.shape[-1] == queries and (ids.ndim == 1 or len(ids) in (1, batch))
        return ids.to(layer_map.device).expand(batch, queries) if fits else None

    def continued(self) -> int:
        """Return how many tokens of the call before this call begins with; 0 if it does not go on with that call."""
        earlier, tokens = self.earlier, self.tokens
        if earlier is None or tokens is None or earlier.ndim != 2 or tokens.ndim != 2 or len(earlier) != len(tokens):
            return 0
        length = earlier.shape[1]
        begins = tokens[:, :length].to(earlier.device)
        return length if begins.shape == earlier.shape and bool((begins == earlier).all()) else 0

    def demand_no_texts(self) -> None:
        """Refuse several texts, since nothing shows how they were padded.

        Raises:
            CallError: The model was called with several texts.
        """
        texts = self.arguments.get("input")
        if isinstance(texts, Sequence) and not isinstance(texts, str) and len(texts) > 1:
            raise CallError(
                f"the model was called with {len(texts)} texts, and nothing shows where they were padded; call it with "
                f"tokens and attention_mask, or give the probe mask="
            )
