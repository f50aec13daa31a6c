"""Rotary positions: W_QK(offset) = W_K R(offset) W_Q', and its norm at many offsets from two Gram matrices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..algebra.gram import gram
from ..algebra.products import upcast
from ..errors import CallError

Pairing = Literal["halves", "adjacent"]


@dataclass(frozen=True)
class Rotary:
    """How positions rotate queries and keys (Su et al. 2021).

    The first `dims` dimensions of a head rotate in pairs, pair i by frequencies[i] for each position; the other
    dimensions do not rotate.

    Attributes:
        dims: How many of the d_head dimensions rotate, or None if unknown.
        pairing: halves, where dimension i pairs with i + dims/2 (transformers), or adjacent, where 2i pairs with 2i + 1
            (the paper, Meta's LLaMA, GPT-J).
        frequencies: Radians per position for each pair, base^(-2i/dims) unless scaled; or None if unknown, so that W_QK
            is known only at offset 0.
        amplitude: The factor on rotated queries and on rotated keys (YaRN). It is left out of W_QK, like the score
            scale.

    Raises:
        CallError: The dimensions do not make pairs, or the frequencies are not finite or not one for each pair.
    """

    dims: int | None = None
    pairing: Pairing = "halves"
    frequencies: tuple[float, ...] | None = None
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        """Refuse dimensions that do not make pairs, and frequencies that are not finite or not one for each pair."""
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise CallError(f"rotary dimensions must come in pairs, got {self.dims}")
        if self.frequencies is not None and self.dims != 2 * len(self.frequencies):
            raise CallError(f"{self.dims} rotary dimensions need half as many frequencies, got {len(self.frequencies)}")
        if not all(map(math.isfinite, self.frequencies or ())):
            raise CallError(f"rotary frequencies must be finite, got {self.frequencies}")

    @classmethod
    def of_base(cls, dims: int, base: float = 10000.0, pairing: Pairing = "halves", factor: float = 1.0) -> "Rotary":
        """Make rotary positions with the frequencies base^(-2i/dims) / factor, i = 0, 1, ..., dims/2 - 1.

        Args:
            dims: How many dimensions rotate.
            base: The base of the frequencies.
            pairing: How the dimensions pair.
            factor: A factor above 1 stretches positions.
        """
        frequencies = tuple(base ** (-2 * pair / dims) / factor for pair in range(dims // 2))
        return cls(dims=dims, pairing=pairing, frequencies=frequencies)

    @classmethod
    def of_tables(cls, sine: Float[Tensor, "position dims"], cosine: Float[Tensor, "position dims"]) -> "Rotary":
        """Derive rotary positions from a model's sine and cosine tables, as exactly as the tables state them.

        The frequencies are the angles at position 1.

        Args:
            sine: The sine of each angle.
            cosine: The cosine of each angle.

        Raises:
            CallError: The tables have no position 1, or they pair dimensions neither by halves nor by neighbours.
        """
        if sine.shape != cosine.shape or sine.shape[0] < 2 or sine.shape[1] % 2:
            raise CallError(
                f"rotary tables must have the same shape, at least two positions and an even number of dimensions, "
                f"got {list(sine.shape)} and {list(cosine.shape)}"
            )
        at_one = torch.stack([upcast(sine[1]), upcast(cosine[1])])
        pairs: dict[Pairing, tuple[Tensor, Tensor]] = {
            "halves": (at_one[:, : at_one.shape[1] // 2], at_one[:, at_one.shape[1] // 2 :]),
            "adjacent": (at_one[:, ::2], at_one[:, 1::2]),
        }
        # The last digit of torch's sine of an angle depends on where the angle stands in its tensor.
        rounding = 4 * torch.finfo(sine.dtype).eps
        for pairing, (first, second) in pairs.items():
            if torch.allclose(first, second, rtol=0, atol=rounding):
                return cls(sine.shape[1], pairing, tuple(torch.atan2(*first).tolist()))
        raise CallError("rotary tables pair the dimensions neither by halves nor by neighbours")

    def rotate(self, rows: Float[Tensor, "*batch d_head"], offset: int) -> Float64[Tensor, "*batch d_head"]:
        """Return R(offset) applied to each row, in float64.

        Args:
            rows: Vectors of a head.
            offset: The offset in positions.

        Raises:
            CallError: The frequencies are unknown and the offset is not 0, or more dimensions rotate than the head has.
        """
        rows = upcast(rows)
        if offset == 0:
            return rows
        first, second = self._pairs(rows.shape[-1])
        angles = offset * torch.tensor(self._known_frequencies(), dtype=torch.float64, device=rows.device)
        cosine, sine = angles.cos(), angles.sin()
        rotated = rows.clone()
        rotated[..., first] = rows[..., first] * cosine - rows[..., second] * sine
        rotated[..., second] = rows[..., second] * cosine + rows[..., first] * sine
        return rotated

    def norms(
        self,
        W_K: Float[Tensor, "*#head d_source d_head"],
        W_Q: Float[Tensor, "*#head d_model d_head"],
        offsets: Sequence[int],
    ) -> Float64[Tensor, "offset *head"]:
        """Return ||W_K R(offset) W_Q'||_F for each offset, from two Gram matrices that are formed once.

        The square is tr(W_K'W_K R W_Q'W_Q R'). Apart from the Gram matrices, each offset costs d_head^2 operations per
        head.

        Args:
            W_K: The key weights.
            W_Q: The query weights.
            offsets: Offsets in positions, the query's minus the key's.

        Raises:
            CallError: As for `rotate`.
        """
        key_gram, query_gram = gram(W_K), gram(W_Q)
        norms = [
            # R G R': rotate the columns, then the rows. Rounding can make the square of a zero norm negative.
            (key_gram * self.rotate(self.rotate(query_gram, offset).mT, offset).mT).sum((-2, -1)).clamp_min(0).sqrt()
            for offset in offsets
        ]
        return torch.stack(norms)

    def _pairs(self, d_head: int) -> tuple[slice, slice]:
        dims = self.dims or 0
        if dims > d_head:
            raise CallError(f"{dims} dimensions should rotate, but a head has only {d_head}")
        if self.pairing == "adjacent":
            return slice(0, dims, 2), slice(1, dims, 2)
        return slice(0, dims // 2), slice(dims // 2, dims)

    def _known_frequencies(self) -> tuple[float, ...]:
        if self.frequencies is None:
            raise CallError(
                "the rotary frequencies of this model are not known, so W_QK is known only at offset 0; "
                "provide a config.json beside the weights, or [rotary] with dims and base in a mapping file"
            )
        return self.frequencies
