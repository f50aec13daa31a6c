"""The measures of attention by name: each gives, for a batch, one row of weights over the tokens of every example."""

from collections.abc import Callable

from jaxtyping import Float64
from torch import Tensor

from .attention_flow import attention_flow
from .gradient_rollout import gradient_rollout
from .model import AttentionModel, Batch
from .readout_rows import last_layer, layer_mean
from .rollout import rollout
from .value_norms import value_norms

#: Rows sum to 1 over an example's tokens and are zero on padding; attention is read where the prediction is.
Measure = Callable[[AttentionModel, Batch], Float64[Tensor, "batch position"]]

#: With the settings of their sources; `functools.partial` gives others.
MEASURES: dict[str, Measure] = {
    "rollout": rollout,
    "attention flow": attention_flow,
    "last layer": last_layer,
    "layer mean": layer_mean,
    "value norms": value_norms,
    "gradient rollout": gradient_rollout,
}
