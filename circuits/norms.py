"""The normalisation in front of attention, and the bases that come of folding it into the weights."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Float64
from torch import Tensor

from .spectrum import upcast

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

    def fold(self, W: Float[Tensor, "head d_model d_head"]) -> Float64[Tensor, "head d_model d_head"]:
        """diag(gain) W, with the mean over d_model taken away for LayerNorm, in float64."""
        folded = upcast(W)
        if self.gain is not None:
            folded = folded * upcast(self.gain)[:, None]
        return folded - folded.mean(dim=-2, keepdim=True) if self.kind == "layer_norm" else folded

    def fold_bias(
        self, b: Float[Tensor, "head d_head"] | None, W: Float[Tensor, "head d_model d_head"]
    ) -> Float64[Tensor, "head d_head"] | None:
        """b + bias W, in float64; None where neither is there."""
        if self.bias is None:
            return None if b is None else upcast(b)
        folded = upcast(self.bias) @ upcast(W)
        return folded if b is None else folded + upcast(b)


@dataclass(frozen=True, eq=False)
class HeadNorm(Norm):
    """The norm of queries or of keys (QK-norm): over each head by itself, or over all of them joined.

    Its gain and bias are [d_head] where the heads share them, else [head, d_head].
    """

    over: Literal["head", "all"] = "head"
