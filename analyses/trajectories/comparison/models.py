"""The change of each head between two models, such as a base model and one that was tuned from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import pandas as pd

from ....circuits.algebra.circuit import Circuit
from ....circuits.algebra.measure import measure
from ....circuits.algebra.threads import side_by_side
from ....circuits.architectures.mapping import Mapping
from ....circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ....circuits.weights.attention_weights import AttentionWeights
from ....circuits.weights.content import layer_content
from ....circuits.weights.layer_keys import LayerKey
from ..motion import motion
from ..snapshot import opened_source
from ..view import View
from .comparable import demand_comparable, demand_same_layers
from .wording import changes_in_words, identical_in_words

#: The quantities of a change, by their columns.
CHANGE_QUANTITIES = {
    "norm_before": "||C||_F in the base model",
    "norm_after": "||C'||_F in the tuned model",
    "change_norm": "||C' - C||_F",
    "relative_change": "||C' - C||_F / ||C||_F",
    "cosine": "<C', C> / (||C'||_F ||C||_F)",
    "change_stable_rank": "sum s^2 / s_1^2 of the singular values of C' - C",
    "change_effective_rank": "exp(-sum w ln w), w = s / sum s, of the singular values of C' - C",
    "change_top_share": "s_1^2 / sum s^2: the share of the change in its top singular direction",
}


@dataclass(frozen=True)
class ModelComparison:
    """The change of each head between two models.

    Attributes:
        base: The address of the model that is compared with.
        tuned: The address of the other model.
        basis: The basis of the circuits.
        rotary_offset: The offset of W_QK in models with rotary positions, query position minus key position.
        table: A row for each stack, layer, head and circuit, with the columns of `CHANGE_QUANTITIES`.
        identical: The layers whose weights and biases are identical to the bit, by stack and number.
        layers: All layers, by stack and number.
    """

    base: str
    tuned: str
    basis: str
    rotary_offset: int
    table: pd.DataFrame
    identical: list[LayerKey]
    layers: list[LayerKey]

    def sentences(self) -> list[str]:
        """Return what the table says, in words: the largest change of each circuit, and the identical layers."""
        return [*changes_in_words(self.table), *identical_in_words(self.identical, self.layers)]


def compare_models(
    base: Any,
    tuned: Any,
    *,
    basis: str = "raw",
    rotary_offset: int = 0,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ReadingKeywords],
) -> ModelComparison:
    """Return the change of W_QK and W_OV of each head between two models of one architecture.

    With C the circuit of a head in the base model and C' that in the tuned model, the columns are

    | column | formula |
    |---|---|
    | norm_before, norm_after | norm(C), norm(C') |
    | change_norm | norm(C' - C) |
    | relative_change | norm(C' - C) / norm(C); NaN where C is zero |
    | cosine | <C', C> / (norm(C') norm(C)); NaN where either is zero |
    | change_stable_rank | sum s^2 / s_1^2 |
    | change_effective_rank | exp(-sum w ln w), w = s / sum s |
    | change_top_share | s_1^2 / sum s^2 |

    in Frobenius norms, with s the singular values of C' - C, whose rank is up to twice the inner width of a head; they
    are NaN where nothing changed. The difference is formed from the differences of the factors, so that it has all its
    digits however small it is, and no matrix of size d_model x d_model is formed.

    Args:
        base: The address of a checkpoint, what `open_checkpoint` or `open_model` returned, or a model in memory.
        tuned: The same for the other model.
        basis: raw, folded or folded_centred.
        rotary_offset: Query position minus key position, for W_QK of layers with rotary positions.
        options: How to read what is not open yet, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: any field of `ReadingOptions`.

    Returns:
        The comparison, whose table has a row for each stack, layer, head and circuit.

    Raises:
        CallError: The models have different layers, shapes, bases or positions, or there is no such checkpoint, basis
            or offset.
        QkovError: A model cannot be read, or is not recognised.
    """
    chosen = reading_options(options, reading)
    before, after = opened_source(base, chosen), opened_source(tuned, chosen)
    demand_same_layers(before, after)
    view = View.of(basis, rotary_offset)
    view.demand_possible(before, before.address)
    identical: set[LayerKey] = set()

    def rows_of(layers: tuple[AttentionWeights, AttentionWeights]) -> list[dict[str, Any]]:
        one, other = layers
        demand_comparable(one, other, before.address, after.address)
        if layer_content(one).digest == layer_content(other).digest:
            identical.add((one.stack, one.layer))
        circuits = view.circuits(one.in_basis(view.basis))
        changed = view.circuits(other.in_basis(view.basis))
        return [row for name, old in circuits.items() for row in _rows(one, name, old, changed[name], view)]

    pairs = zip(before.layers(), after.layers(), strict=True)
    rows = [row for of_layer in side_by_side(rows_of, pairs) for row in of_layer]
    return ModelComparison(
        base=before.address,
        tuned=after.address,
        basis=view.basis,
        rotary_offset=rotary_offset,
        table=pd.DataFrame(rows),
        identical=[key for key in before.layer_keys if key in identical],
        layers=before.layer_keys,
    )


def _rows(
    weights: AttentionWeights, name: str, before: Circuit, after: Circuit, view: View
) -> Iterator[dict[str, Any]]:
    moved = motion(after, before, 1)
    spectrum = measure(after - before, eigenvalues=False)
    top_share = 1 / spectrum["stable_rank"]
    values = {
        "norm_before": before.frobenius_norm(),
        "norm_after": after.frobenius_norm(),
        "change_norm": moved["change_norm"],
        "relative_change": moved["relative_speed"],
        "cosine": moved["previous_cosine"],
        "change_stable_rank": spectrum["stable_rank"],
        "change_effective_rank": spectrum["effective_rank"],
        "change_top_share": top_share,
    }
    listed = {quantity: each.tolist() for quantity, each in values.items()}
    for head in range(before.shape[0]):
        yield {
            **view.head_identity(weights, name, head),
            **{quantity: each[head] for quantity, each in listed.items()},
        }
