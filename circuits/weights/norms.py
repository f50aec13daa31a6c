"""The normalisation in front of attention, and the bases that come of folding it into the weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..algebra.gram import Folded
from ..algebra.products import multiply, upcast

#: raw: the weights as they are stored. folded: the gain of the norm in front multiplied into what reads the residual
#: stream, which for LayerNorm is centred too, as LayerNorm takes the mean away. folded_centred: what is written is
#: centred as well, where the model's norms are LayerNorms, since every reader takes the mean away.
Basis = Literal["raw", "folded", "folded_centred"]
BASES: tuple[Basis, ...] = ("raw", "folded", "folded_centred")


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm or RMSNorm over the last dimension: gain * normalised + bias.

    Attributes:
        kind: layer_norm takes the mean away, rms_norm does not.
        gain: what multiplies, already 1 + w where a model stores w (Gemma); None where there is none.
        bias: what is added; None where there is none.
        eps: added to the mean square; None where it is not known.
    """

    kind: Literal["layer_norm", "rms_norm"]
    gain: Float[Tensor, "*head d_model"] | None = None
    bias: Float[Tensor, "*head d_model"] | None = None
    eps: float | None = None

    def fold(self, W: Float[Tensor, "head d_model d_head"]) -> Folded:
        """diag(gain) W, with the mean over d_model taken away for LayerNorm, not yet formed."""
        return Folded(W, self.gain, centred=self.kind == "layer_norm")

    def fold_bias(
        self, b: Float[Tensor, "head d_head"] | None, W: Float[Tensor, "head d_model d_head"]
    ) -> Float64[Tensor, "head d_head"] | None:
        """b + bias W, in float64; None where neither is there."""
        if self.bias is None:
            return None if b is None else upcast(b)
        folded = multiply(self.bias[None], W).squeeze(-2)
        return folded if b is None else folded + upcast(b)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """The norm of queries or of keys (QK-norm), which is folded into nothing.

    Attributes:
        kind: None where only the names of its tensors are known.
        gain, bias: as of `Norm`; [d_head] where the heads share them.
        eps: added to the mean square; None where it is not known.
        over: each head by itself, or all of them joined.
    """

    kind: Literal["layer_norm", "rms_norm"] | None
    gain: Float[Tensor, "*head d_head"] | None = None
    bias: Float[Tensor, "*head d_head"] | None = None
    eps: float | None = None
    over: Literal["head", "all"] = "head"


def is_centred(W: Float[Tensor, "*batch rows columns"], dim: int) -> bool:
    """Whether the mean over a dimension is zero but for rounding, as centring leaves it; not so where all is zero.

    A mean of n numbers drawn apart is of the order 1/sqrt(n) of their size, and of numbers that were centred and then
    rounded to a type of precision eps, eps/sqrt(n). Centring itself is done in float32.
    """
    eps = max(torch.finfo(W.dtype).eps, torch.finfo(torch.float32).eps)
    tolerance = min(16 * eps, 0.1 * W.shape[dim] ** -0.5)
    W = upcast(W)
    size = W.square().mean(dim).sqrt()
    return bool(size.any()) and bool((W.mean(dim).abs() <= tolerance * size).all())
