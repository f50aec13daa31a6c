"""What the attention maps of a model are like, which a trial run shows, and the maps of later runs layer by layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ....circuits.errors import CallError, QkovError
from ....circuits.weights.layer_keys import LayerKey, layer_name
from ..maps.search import source_of
from ..maps.source import LayerMap, LayerReading, MapSource
from ..maps.transformers import REMEDY, ROUNDING
from .model import InputSink, MapSink

#: Number of tokens of the sequence that a model is tried on.
TRIAL_LENGTH = 5


@dataclass(frozen=True, eq=False)
class ModelMaps:
    """The layers of one stack whose maps are read, numbered from 0 in the order in which they run.

    Attributes:
        name: The model's name, for messages.
        source: Where the maps come from.
        keys: The layers.
        heads: Number of heads of each layer.
        causal: Whether the masks of all layers hide later positions; None if they do not say, and no map shows it.
    """

    name: str
    source: MapSource
    keys: tuple[LayerKey, ...]
    heads: int
    causal: bool | None

    @classmethod
    def by_trial(cls, model: nn.Module, run: Callable[[], object], name: str) -> "ModelMaps":
        """Run a model once and look at its maps.

        Args:
            model: The model whose attention is read.
            run: Runs it on one sequence of `TRIAL_LENGTH` tokens without padding.
            name: The model's name, for messages.

        Raises:
            CallError: There are no attention maps, or they do not lead from one sequence to itself in one stack of
                layers that have the same number of heads.
        """
        source = source_of(model)
        demand_one_stack({stack for stack, _ in source.keys if stack in ("encoder", "decoder")}, name)
        heads: dict[LayerKey, int] = {}
        ahead: list[bool | None] = []

        def look(layer_map: LayerReading) -> None:
            attention = _demand_map(layer_map, name)
            heads[layer_map.key] = attention.shape[1]
            assert isinstance(layer_map, LayerMap)
            ahead.append(_sees_ahead(layer_map))

        with torch.no_grad(), _attached(source, look, None):
            run()
        if not heads:
            raise CallError(f"{name} gives no attention maps [batch, head, query, key]; {REMEDY}")
        demand_one_stack({stack for stack, _ in heads}, name)
        counts = sorted(set(heads.values()))
        if len(counts) > 1:
            raise CallError(f"the layers of {name} have {', '.join(map(str, counts))} heads; expected one number")
        causal = False if any(ahead) else None if None in ahead else True
        return cls(name, source, tuple(heads), counts[0], causal)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    def demand_causal(self) -> bool:
        """Return whether a token sees only those before it.

        Raises:
            CallError: That is not known.
        """
        if self.causal is None:
            raise CallError(
                f"the masks of {self.name} do not say whether a token sees those after it, and weights of 0 on them in "
                f"one run do not show it; this model is not supported"
            )
        return self.causal

    @contextmanager
    def handed_on(self, maps: MapSink | None, inputs: InputSink | None) -> Iterator[None]:
        """Hand on the maps of the model's run inside this context, and what its attention reads.

        Maps carry gradients where gradients are on. Nothing but the sink keeps them.

        Raises:
            CallError: A layer gave no map.
            QkovError: There were more or fewer maps than layers, or they came in another order than in the trial run.
        """
        numbers = {key: number for number, key in enumerate(self.keys)}
        seen: list[LayerKey] = []

        def receive(layer_map: LayerReading) -> None:
            key = layer_map.key
            seen.append(key)
            if key not in numbers:
                raise QkovError(f"{layer_name(*key)} of {self.name} gave a map, which it had not done in the trial run")
            if maps is not None:
                assert isinstance(layer_map, LayerMap)
                maps(numbers[key], layer_map.attention)

        def receive_input(key: LayerKey, value: Float[Tensor, "batch position d_model"]) -> None:
            if inputs is not None:
                inputs(numbers[key], value)

        with _attached(self.source, receive, None if inputs is None else receive_input):
            yield
        if tuple(seen) != self.keys:
            raise QkovError(
                f"expected one attention map from each of the {self.layers} layers of {self.name} in order, got "
                f"{', '.join(layer_name(*key) for key in seen) or 'none'}"
            )


def _sees_ahead(layer_map: LayerMap) -> bool | None:
    """Return whether a token sees those after it: by the layer's mask, or else because it attends to one of them."""
    seen = layer_map.seen()
    if seen is not None:
        return bool(seen.expand(-1, layer_map.attention.shape[2], -1).triu(1).any())
    return True if bool((layer_map.attention.triu(1) > 0).any()) else None


def demand_one_stack(stacks: set[str], name: str) -> None:
    """Refuse a model whose attention is in several stacks of layers.

    Raises:
        CallError: It has an encoder and a decoder, or attends to another sequence.
    """
    if len(stacks) > 1:
        raise CallError(
            f"{name} has an encoder and a decoder, so its attention maps are of three kinds and no single row of them "
            f"leads from the prediction to the input; give a model with one stack"
        )


@contextmanager
def _attached(
    source: MapSource,
    receive: Callable[[LayerReading], None],
    inputs: Callable[[LayerKey, Tensor], None] | None,
) -> Iterator[None]:
    removers: list[Callable[[], None]] = []
    try:
        # One by one, so that an interrupt in between leaves no hook behind.
        for remove in source.attach(receive, inputs=inputs, consume=True):
            removers.append(remove)
        with source.during():
            yield
    finally:
        for remove in removers:
            remove()


def _demand_map(layer_map: LayerReading, name: str) -> Float[Tensor, "batch head query key"]:
    """Return the map of a layer in the trial run, or raise CallError if no row of it belongs to each token."""
    layer = layer_name(*layer_map.key)
    if not isinstance(layer_map, LayerMap):
        raise CallError(f"{layer} of {name} has one row of attention for each sequence, and no map")
    attention = layer_map.attention
    if attention.ndim != 4:
        raise CallError(
            f"{layer} of {name} gave a map of shape {list(attention.shape)}; expected [batch, head, query, key]"
        )
    if len(attention) != 1:
        raise CallError(
            f"{layer} of {name} gives {len(attention)} maps for one sequence, of parts such as windows, so no row of "
            f"them leads from the prediction to the input; expected one map for each sequence"
        )
    queries, keys = attention.shape[2:]
    if (queries, keys) != (TRIAL_LENGTH, TRIAL_LENGTH):
        raise CallError(
            f"{layer} of {name} attends from {queries} queries to {keys} keys in a sequence of {TRIAL_LENGTH} tokens, "
            f"so no row of its map belongs to each token; expected a model that keeps every position in every layer"
        )
    if bool((attention < 0).any()) or bool((attention.sum(dim=-1) > 1 + ROUNDING).any()):
        raise CallError(
            f"{layer} of {name} gives scores in the position of its attention map (some are negative, or a row sums to "
            f"more than 1); {REMEDY}"
        )
    return attention
