"""The change of each head between two models, such as a base model and one that was tuned from it."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.measure import measure
from ...circuits.algebra.threads import side_by_side
from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ...circuits.storage.atomic_write import write_atomically
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.content import layer_content
from ...circuits.weights.layer_keys import LayerKey, capitalised, layer_name, layers_in_words
from ...circuits.weights.source import AttentionSource
from .motion import motion
from .snapshot import opened_source
from .view import View

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
#: Two models that differ in this much of a rotary frequency have different positions; configs round them.
_SAME_FREQUENCY = 1e-5


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
        return [*changes_in_words(self.table), *_identical_in_words(self.identical, self.layers)]


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
    _demand_same_layers(before, after)
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


def changes_in_words(table: pd.DataFrame) -> list[str]:
    """Return a sentence for each circuit: where its largest change is, and the median over the heads.

    Args:
        table: The table of a `ModelComparison`.
    """
    sentences = []
    for circuit, rows in table.groupby("circuit", sort=False):
        known = rows.dropna(subset="relative_change")
        if len(known):
            (largest,) = known.nlargest(1, "relative_change").to_dict("records")
            where = f"{layer_name(largest['stack'], largest['layer'])}, head {largest['head']}"
            heads = f"{len(known)} head{'s' * (len(known) > 1)}"
            sentences.append(
                f"The largest change of W_{circuit} is in {where}: {share(largest['relative_change'])} of its norm; "
                f"the median over {heads} is {share(known['relative_change'].median())}."
                if largest["relative_change"] > 0
                else f"W_{circuit} did not change in any of {heads}."
            )
        missing = len(rows) - len(known)
        if missing:
            sentences.append(
                f"The change of W_{circuit} is unknown for {missing} head{'s' * (missing > 1)}, whose weights are zero "
                "in the base model, or NaN or infinite in either."
            )
    return sentences


def share(value: float) -> str:
    """Return a share as a percentage with two significant digits."""
    if value == 0:
        return "0 %"
    percentage = float(f"{100 * value:.1e}")
    digits = max(0, 1 - math.floor(math.log10(percentage)))
    return f"{percentage:.{digits}f} %" if percentage >= 1e-3 else f"{percentage:.1e} %"


def demand_comparable(one: AttentionWeights, other: AttentionWeights, base: str, tuned: str) -> None:
    """Refuse two layers whose circuits do not mean the same.

    Args:
        one: A layer of the base model.
        other: The same layer of the tuned model.
        base: The address of the base model, for the message.
        tuned: The address of the other model.

    Raises:
        CallError: Heads, shapes, the stored basis, norms or positions differ.
    """
    for name, (of_one, of_other) in _facts(one, other):
        if of_one != of_other:
            raise CallError(
                f"{one.label} does not compare: {name} is {of_one} in {base} and {of_other} in {tuned}; "
                f"qkov compare takes two models of one architecture"
            )


def _facts(one: AttentionWeights, other: AttentionWeights) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the facts that have to agree, as they are in both layers; what is unknown in one of them is left out."""
    yield "the number of heads", (one.heads, other.heads)
    yield "the number of key-value heads", (one.heads // one.group_size, other.heads // other.group_size)
    circuits = [each.circuits(each.stored_basis) for each in (one, other)]
    for name in ("QK", "OV"):
        yield f"the shape of W_{name}", (_shape(circuits[0].get(name)), _shape(circuits[1].get(name)))
    yield "the stored basis", (one.stored_basis, other.stored_basis)
    yield "the kind of attention", tuple("cross" if each.facts.cross else "self" for each in (one, other))
    for name in ("norm", "query_norm", "key_norm"):
        if name != "norm" or "norm" not in one.facts.unknown | other.facts.unknown:
            yield f"the {name.replace('_', ' ')}", tuple(_kind(getattr(each, name)) for each in (one, other))
    if one.facts.positions is not None and other.facts.positions is not None:
        yield "the kind of positions", (one.facts.positions, other.facts.positions)
    rotary, other_rotary = one.facts.rotary, other.facts.rotary
    if rotary is None or other_rotary is None:
        return
    yield "the pairing of rotary dimensions", (rotary.pairing, other_rotary.pairing)
    if rotary.frequencies is None or other_rotary.frequencies is None:
        return
    yield "the number of rotary dimensions", (rotary.dims, other_rotary.dims)
    for pair, frequencies in enumerate(zip(rotary.frequencies, other_rotary.frequencies, strict=False)):
        if not math.isclose(*frequencies, rel_tol=_SAME_FREQUENCY):
            yield f"the frequency of rotary pair {pair}", tuple(f"{frequency:.4g}" for frequency in frequencies)


def _shape(circuit: Circuit | None) -> str:
    return "none" if circuit is None else f"{circuit.shape[-2]} x {circuit.shape[-1]}"


def _kind(norm: Any) -> str:
    return "none" if norm is None else norm.kind or "of unknown kind"


def _demand_same_layers(before: AttentionSource, after: AttentionSource) -> None:
    if before.layer_keys != after.layer_keys:
        raise CallError(
            f"{before.address} has {layers_in_words(before.layer_keys)} and {after.address} has "
            f"{layers_in_words(after.layer_keys)}; qkov compare takes two models of one architecture"
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
    rotary = name == "QK" and weights.facts.rotary is not None
    for head in range(before.shape[0]):
        yield {
            "stack": weights.stack,
            "layer": weights.layer,
            "head": head,
            "key_value_head": head // weights.group_size,
            "circuit": name,
            "basis": view.basis,
            "rotary_offset": view.rotary_offset if rotary else None,
            **{quantity: each[head] for quantity, each in listed.items()},
        }


def _identical_in_words(identical: list[LayerKey], layers: list[LayerKey]) -> list[str]:
    if not identical:
        return ["No layer is identical to the bit."]
    if len(identical) == len(layers):
        return [
            f"All {len(layers)} layers are identical to the bit, biases included."
            if len(layers) > 1
            else "The only layer is identical to the bit, biases included."
        ]
    named = layers_in_words(identical)
    return [f"{capitalised(named)} {'are' if len(identical) > 1 else 'is'} identical to the bit, biases included."]


def write_changes(comparison: ModelComparison, path: Path) -> None:
    """Write the table of a comparison, whole or not at all.

    Args:
        comparison: The comparison.
        path: The path of the file, whose name says the format: .parquet or .csv.

    Raises:
        CallError: The name ends in neither, or the path cannot be written to.
    """
    demand_table_format(path)
    named = {"base": comparison.base, "tuned": comparison.tuned}
    table = comparison.table.assign(**named)[[*named, *comparison.table.columns]]
    content = table.to_csv(index=False).encode() if path.suffix == ".csv" else _parquet(table)
    write_atomically(path, content)


def demand_table_format(path: Path) -> None:
    """Refuse the name of a table whose format is not known.

    Raises:
        CallError: The name ends in neither .parquet nor .csv.
    """
    if path.suffix not in (".parquet", ".csv"):
        raise CallError(f"{path} should end in .parquet or .csv, which says the format of the table")


def _parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
