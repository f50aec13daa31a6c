"""Attention weighted by the size of what it carries: the norm of alpha times the transformed value of a token."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ....circuits.algebra.products import multiply, upcast
from ....circuits.errors import CallError
from ....circuits.weights.attention_weights import AttentionWeights
from ..models.model import AttentionModel, Batch, MapSink
from .rollout import ABNAR_ZUIDEMA, FusedMaps, Rollout


def value_norms(
    model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA, *, by_head: bool = False
) -> Float64[Tensor, "batch position"]:
    """Return the rollout's row at the readout position, computed from value norms instead of attention.

        N_l[i, j] = || sum_h alpha_h,ij f_h(x_j) ||,      f_h(x) = (x W_V + b_V) W_O

    x_j is what the attention of layer l reads at position j. N_l, [query, key], takes the place of the fused attention
    map F_l in `Rollout`: its rows are divided by their sums over the tokens before the identity is mixed in.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        settings: settings of the rollout; `heads` matters only with `by_head`.
        by_head: whether to take the norm of each head, ||alpha_h,ij f_h(x_j)||, and then fuse the heads. By default the
            vectors of the heads are summed before the norm is taken.

    Returns:
        [batch, position]; each row sums to 1 over the tokens of its example and is 0 on padding.

    Raises:
        CallError: The settings do not fit the model, a layer has no OV circuit, or weights of heads were given without
            `by_head`.
        QkovError: The norms are not finite, or all zero for a query.

    Source of the norms: Kobayashi et al., "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
    2020. Source of the rollout: see `Rollout`.
    """
    settings.demand_fit(model)
    if not by_head and not isinstance(settings.heads, str):
        raise CallError(
            "weights of heads were given, but the vectors of the heads are summed before the norm is taken; use "
            "by_head=True"
        )
    fused = FusedMaps(batch.mask, settings)
    norms = ValueNorms(model.attention_weights(), fused, by_head)
    model.watch(batch, norms.maps, norms.inputs)
    return fused.row(model.reading_positions(batch))


@dataclass(frozen=True, eq=False)
class TokenValues:
    """The transformed values f_h(x_j) = (x_j W_V + b_V) W_O of every head h and token j, as their inner products.

    The products <f_h(x_j), f_g(x_j)> determine the norms of all sums over heads, so nothing of size heads * d_model is
    stored for a token.

    Attributes:
        products: the inner products, [batch, position, head, head], in float64.
    """

    products: Float64[Tensor, "batch position head other_head"]

    @classmethod
    def of(cls, inputs: Float[Tensor, "batch position d_model"], weights: AttentionWeights) -> "TokenValues":
        """Compute the products from what a layer's attention reads, after the norm.

        With v_h = x W_V + b_V, a product is v_h (W_Oh W_Og') v_g', through matrices [d_head, d_head]. Values are
        clipped if the model clips them. b_O belongs to no token and is left out.

        Args:
            inputs: what the layer's attention reads.
            weights: the layer's weights.

        Raises:
            CallError: The weights hold no OV circuit, or are those of cross-attention.
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
        """The norms ||f_h(x_j)||."""
        return self.products.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().mT

    def per_head(self, attention: Float[Tensor, "batch head query key"]) -> Float64[Tensor, "batch head query key"]:
        """Return ||alpha_h,ij f_h(x_j)||, the norm of what each head writes at i from what it read at j."""
        return upcast(attention).to(self.products.device) * self.norms[:, :, None]

    def over_heads(self, attention: Float[Tensor, "batch head query key"]) -> Float64[Tensor, "batch query key"]:
        """Return ||sum_h alpha_h,ij f_h(x_j)||; heads that write in opposite directions cancel.

        If the sum cancels to zero, rounding leaves about 1e-8 of its largest term.
        """
        # One key at a time is in the batch of a product over heads, so no more than the size of one map is needed
        # beside the map itself.
        weights = upcast(attention).to(self.products.device).permute(0, 3, 2, 1)
        squares = ((weights @ self.products) * weights).sum(dim=-1)
        return squares.clamp_min(0).sqrt().mT


@dataclass(eq=False)
class ValueNorms:
    """A filter between a model and a `MapSink` that turns each layer's attention into norms of what it carries.

    Its `inputs` is an `InputSink` and its `maps` a `MapSink`; a layer's inputs have to come before its map. The rows of
    the norms do not sum to 1.

    Attributes:
        weights: raw weights of every layer.
        sink: receives each layer's norms, [batch, 1, query, key], or [batch, head, query, key] with `by_head`.
        by_head: whether heads are kept separate; otherwise their vectors are summed before the norm is taken.

    Raises:
        CallError: A map came without its layer's inputs, or a layer has no OV circuit.

    Source: Kobayashi et al., "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms", 2020.
    """

    weights: list[AttentionWeights]
    sink: MapSink
    by_head: bool = False
    _waiting: dict[int, TokenValues] = field(default_factory=dict, init=False)

    def inputs(self, layer: int, read: Float[Tensor, "batch position d_model"]) -> None:
        """Compute the transformed values of a layer's tokens and keep them until its map comes.

        Args:
            layer: number of the layer.
            read: what the layer's attention reads.
        """
        if layer >= len(self.weights):
            raise CallError(f"there are weights for {len(self.weights)} layers, and inputs came for layer {layer}")
        self._waiting[layer] = TokenValues.of(read, self.weights[layer])

    def maps(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        """Turn a layer's map into norms and pass them to the sink.

        Args:
            layer: number of the layer.
            attention: the layer's attention map.
        """
        if layer not in self._waiting:
            raise CallError(f"the map of layer {layer} came before its inputs; ask the model for both")
        values = self._waiting.pop(layer)
        self.sink(layer, values.per_head(attention) if self.by_head else values.over_heads(attention)[:, None])


def _values(
    inputs: Float[Tensor, "batch position d_model"], weights: AttentionWeights
) -> tuple[Float64[Tensor, "head token inner"], Tensor]:
    """Return what each query head carries of each token, and the matrices that write it, [head, inner, d_model]."""
    if weights.facts.cross:
        raise CallError(
            f"{weights.label} is cross-attention: its keys are tokens of another sequence, so value norms do not apply"
        )
    if not weights.has_ov:
        raise CallError(f"{weights.label} has no W_OV; value norms need W_V and W_O, or W_OV itself")
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
