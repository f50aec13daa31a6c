"""Attention weighted by the size of what it carries: the norm of alpha times the value that OV makes of a token."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ....circuits.algebra.products import multiply, upcast
from ....circuits.errors import CallError
from ....circuits.weights.attention_weights import AttentionWeights
from ..models.model import AttentionModel, Batch, MapSink
from .rollout import ABNAR_ZUIDEMA, FusedMaps, Rollout


@dataclass(frozen=True, eq=False)
class TokenValues:
    """f_h(x_j) = (x_j W_V + b_V) W_O of every head and token, kept as the inner products <f_h(x_j), f_g(x_j)>.

    All norms of sums over heads follow from these, so that nothing of size heads * d_model a token is formed.

    Attributes:
        products: [batch, position, head, head], in float64.
    """

    products: Float64[Tensor, "batch position head other_head"]

    @classmethod
    def of(cls, inputs: Float[Tensor, "batch position d_model"], weights: AttentionWeights) -> "TokenValues":
        """Compute them from what a layer's attention reads, after the norm.

        With v_h = x W_V + b_V, a product is v_h (W_Oh W_Og') v_g', through d_head x d_head matrices. Values are clipped
        where the model clips them. b_O belongs to no token and is left out.

        Raises:
            CallError: the weights hold no OV circuit, or are those of cross-attention.
        """
        values, written = _values(inputs, weights)
        heads, examples, positions = values.shape[0], *inputs.shape[:2]
        products = torch.empty(examples * positions, heads, heads, dtype=torch.float64, device=values.device)
        for head in range(heads):
            between = multiply(written[head], written[head:].mT)
            pairs = ((values[head] @ between) * values[head:]).sum(dim=-1).T
            products[:, head, head:] = pairs
            products[:, head:, head] = pairs
        return cls(products.unflatten(0, (examples, positions)))

    @property
    def norms(self) -> Float64[Tensor, "batch head position"]:
        """||f_h(x_j)||."""
        return self.products.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().mT

    def per_head(self, attention: Float[Tensor, "batch head query key"]) -> Float64[Tensor, "batch head query key"]:
        """Return ||alpha_h,ij f_h(x_j)||: what each head writes at i of what it read at j."""
        return upcast(attention).to(self.products.device) * self.norms[:, :, None]

    def over_heads(self, attention: Float[Tensor, "batch head query key"]) -> Float64[Tensor, "batch query key"]:
        """Return ||sum_h alpha_h,ij f_h(x_j)||: heads that write against each other cancel.

        Rounding leaves of a sum that cancels to nothing about 1e-8 of the largest of its terms.
        """
        # One key at a time in the batch of a product over heads: no more than one map's size beside the map itself.
        weights = upcast(attention).to(self.products.device).permute(0, 3, 2, 1)
        squares = ((weights @ self.products) * weights).sum(dim=-1)
        return squares.clamp_min(0).sqrt().mT


@dataclass(eq=False)
class ValueNorms:
    """Turns a layer's attention into norms of what it carries, and hands those on; rows do not sum to 1.

    Its `inputs` is an `InputSink` and its `maps` a `MapSink`; a layer's inputs come first.

    Attributes:
        weights: of every layer, raw.
        sink: takes each layer's norms, [batch, 1, query, key] or for every head by itself [batch, head, query, key].
        by_head: whether heads are kept apart; else their vectors are summed before the norm is taken.

    Raises:
        CallError: a map came without its layer's inputs, or a layer has no OV circuit.

    Source: Kobayashi et al., "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms", 2020.
    """

    weights: list[AttentionWeights]
    sink: MapSink
    by_head: bool = False
    _waiting: dict[int, TokenValues] = field(default_factory=dict, init=False)

    def inputs(self, layer: int, read: Float[Tensor, "batch position d_model"]) -> None:
        """Keep what a layer's tokens are worth until its map comes."""
        if layer >= len(self.weights):
            raise CallError(f"there are weights for {len(self.weights)} layers, and inputs came for layer {layer}")
        self._waiting[layer] = TokenValues.of(read, self.weights[layer])

    def maps(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        """Weight a layer's map."""
        if layer not in self._waiting:
            raise CallError(f"the map of layer {layer} came before its inputs; ask the model for both")
        values = self._waiting.pop(layer)
        self.sink(layer, values.per_head(attention) if self.by_head else values.over_heads(attention)[:, None])


def value_norms(
    model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA, *, by_head: bool = False
) -> Float64[Tensor, "batch position"]:
    """Return the rollout, where each prediction is read, of value norms in place of attention; rows sum to 1.

    Every layer's norms are brought to sum 1 over the tokens before the identity is mixed in.

    Args:
        model: whose attention it is.
        batch: of examples.
        settings: of the rollout; how heads are fused matters only where they are kept apart.
        by_head: whether each head's norms are taken and then fused; else heads are summed as vectors first.

    Raises:
        CallError: the settings do not fit the model, or a layer has no OV circuit.
        QkovError: the norms are not finite, or all zero for a query.
    """
    settings.demand_fit(model)
    if not by_head and not isinstance(settings.heads, str):
        raise CallError("weights of heads were given, and heads are summed as vectors: ask for norms by head")
    fused = FusedMaps(batch.mask, settings)
    norms = ValueNorms(model.attention_weights(), fused, by_head)
    model.watch(batch, norms.maps, norms.inputs)
    return fused.row(model.reading_positions(batch))


def _values(
    inputs: Float[Tensor, "batch position d_model"], weights: AttentionWeights
) -> tuple[Float64[Tensor, "head token inner"], Tensor]:
    """What each query head carries of each token, and the matrices that write it, [head, inner, d_model]."""
    if weights.facts.cross:
        raise CallError(f"{weights.place} attends to another stream, whose tokens are not those of its own")
    if not weights.has_ov:
        raise CallError(f"{weights.place} has no W_OV: that takes W_V and W_O, or W_OV itself")
    read = upcast(inputs).flatten(0, 1)
    if weights.W_OV is not None:
        written = weights.W_OV.mT.to(read.device)
        return read.expand(len(written), *read.shape), written
    W_V, W_O = weights.W_V, weights.W_O
    assert W_V is not None
    assert W_O is not None
    values = read @ upcast(W_V).to(read.device)
    if weights.b_V is not None:
        values = values + upcast(weights.b_V).to(read.device)[:, None]
    if weights.facts.clip_qkv is not None:
        values = values.clamp(-weights.facts.clip_qkv, weights.facts.clip_qkv)
    return values.repeat_interleave(weights.group_size, dim=0), W_O.to(read.device)
