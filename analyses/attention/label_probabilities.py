"""How probable a model finds the right class or continuation of each example."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from ...circuits.errors import CallError
from ..tasks.example import Example


def label_probabilities(
    examples: Sequence[Example],
    log_probabilities: Sequence[Float64[Tensor, " _alternative"]],
    *,
    among_alternatives: bool = False,
) -> Float64[np.ndarray, " example"]:
    """Return the probability of each example's label; NaN where there is none.

    Args:
        examples: with or without labels.
        log_probabilities: of the alternatives of each, as `predictions` gives them.
        among_alternatives: whether it is the probability among the alternatives alone, as it is in any case among the
            classes of a classifier; else it is that in the whole vocabulary.

    Raises:
        CallError: there are not as many, or a label is none of the alternatives.
    """
    if len(examples) != len(log_probabilities):
        raise CallError(f"log-probabilities of {len(log_probabilities)} examples were given for {len(examples)}")
    found = np.full(len(examples), np.nan)
    for number, (example, given) in enumerate(zip(examples, log_probabilities, strict=True)):
        if example.label is None:
            continue
        if not 0 <= example.label < len(given):
            raise CallError(
                f"example {example.id or number} has the label {example.label}; expected one of its {len(given)} "
                f"alternatives, from 0"
            )
        found[number] = (given.log_softmax(dim=0) if among_alternatives else given)[example.label].exp()
    return found
