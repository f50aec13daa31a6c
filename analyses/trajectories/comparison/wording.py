"""How the changes between two models are worded."""

import math

import pandas as pd

from ....circuits.weights.layer_keys import LayerKey, capitalised, layer_name, layers_in_words


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


def identical_in_words(identical: list[LayerKey], layers: list[LayerKey]) -> list[str]:
    """Return the sentence that names the layers that are identical to the bit.

    Args:
        identical: These layers.
        layers: All layers.
    """
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
