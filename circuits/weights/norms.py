"""The normalisation in front of attention, and the bases that result from folding it into the weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..algebra.gram import Folded
from ..algebra.products import multiply, upcast

#: raw: the weights as they are stored. folded: the gain of the norm is multiplied into the matrices that read the
#: residual stream, which for LayerNorm are centred too because LayerNorm subtracts the mean. folded_centred: for
#: LayerNorms, the matrix that writes is centred as well, since every reader subtracts the mean.
Basis = Literal["raw", "folded", "folded_centred"]
BASES: tuple[Basis, ...] = ("raw", "folded", "folded_centred")


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm or RMSNorm over the last dimension: gain * normalised + bias.

    Attributes:
        kind: layer_norm subtracts the mean, rms_norm does not.
        gain: The gain, which is already 1 + w if a model stores w (Gemma), or None.
        bias: The bias, or None.
        eps: The number added to the mean square, or None if it is unknown.
    """

    kind: Literal["layer_norm", "rms_norm"]
    gain: Float[Tensor, "*head d_model"] | None = None
    bias: Float[Tensor, "*head d_model"] | None = None
    eps: float | None = None

    def fold(self, W: Float[Tensor, "head d_model d_head"]) -> Folded:
        """Return diag(gain) W, minus its mean over d_model for LayerNorm; it is not formed yet."""
        return Folded(W, self.gain, centred=self.kind == "layer_norm")

    def fold_bias(
        self, b: Float[Tensor, "head d_head"] | None, W: Float[Tensor, "head d_model d_head"]
    ) -> Float64[Tensor, "head d_head"] | None:
        """Return b + bias W in float64, or None if there is neither."""
        if self.bias is None:
            return None if b is None else upcast(b)
        folded = multiply(self.bias[None], W).squeeze(-2)
        return folded if b is None else folded + upcast(b)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """The norm of queries or of keys (QK-norm), which cannot be folded.

    Attributes:
        kind: The kind of norm, or None if only the names of its tensors are known.
        gain, bias: As for `Norm`; [d_head] if the heads share them.
        eps: The number added to the mean square, or None if it is unknown.
        over: Whether each head is normalised by itself, or all heads together.
    """

    kind: Literal["layer_norm", "rms_norm"] | None
    gain: Float[Tensor, "*head d_head"] | None = None
    bias: Float[Tensor, "*head d_head"] | None = None
    eps: float | None = None
    over: Literal["head", "all"] = "head"


def is_centred(W: Float[Tensor, "*batch rows columns"], dim: int) -> bool:
    """Return whether the mean over a dimension is zero up to rounding, as after centring.

    Zero matrices do not count as centred. A mean of n independent numbers is of the order 1/sqrt(n) of their size. A
    mean of numbers that were centred and then rounded to a type of precision eps is of the order eps/sqrt(n). Centring
    itself is done in float32.

    Args:
        W: The matrices.
        dim: The dimension over which to take the mean.
    """
    eps = max(torch.finfo(W.dtype).eps, torch.finfo(torch.float32).eps)
    tolerance = min(16 * eps, 0.1 * W.shape[dim] ** -0.5)
    W = upcast(W)
    largest = W.abs().amax() if W.numel() else torch.zeros(())
    if not largest > 0 or not largest.isfinite():
        return False
    # Squares of the largest numbers would not be finite, and infinite sizes have room for any mean.
    W = W / largest
    size = W.square().mean(dim).sqrt()
    return bool((W.mean(dim).abs() <= tolerance * size).all())
