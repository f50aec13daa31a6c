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

    The first `dims` of a head's dimensions rotate in pairs, pair i by frequencies[i] a position; the rest stay.

    Attributes:
        dims: how many of d_head rotate; None where that is not known.
        pairing: halves, where dimension i pairs with i + dims/2 (transformers), or adjacent, 2i with 2i + 1 (the paper,
            Meta's LLaMA, GPT-J).
        frequencies: radians a position, one for each pair, base^(-2i/dims) unless they are scaled; None where they are
            not known: then W_QK is known at offset 0 alone.
        amplitude: factor on rotated queries and on rotated keys (YaRN); it is left out of W_QK, like the score scale.
    """

    dims: int | None = None
    pairing: Pairing = "halves"
    frequencies: tuple[float, ...] | None = None
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        """Refuse dimensions that make no pairs, and frequencies that are not one a pair or not finite."""
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise CallError(f"rotary dimensions come in pairs, got {self.dims}")
        if self.frequencies is not None and self.dims != 2 * len(self.frequencies):
            raise CallError(f"{self.dims} rotary dimensions need half as many frequencies, got {len(self.frequencies)}")
        if not all(map(math.isfinite, self.frequencies or ())):
            raise CallError(f"rotary frequencies should be finite, got {self.frequencies}")

    @classmethod
    def of_base(cls, dims: int, base: float = 10000.0, pairing: Pairing = "halves", factor: float = 1.0) -> "Rotary":
        """Frequencies base^(-2i/dims) / factor, i = 0, 1, ..., dims/2 - 1; a factor above 1 stretches positions."""
        frequencies = tuple(base ** (-2 * pair / dims) / factor for pair in range(dims // 2))
        return cls(dims=dims, pairing=pairing, frequencies=frequencies)

    @classmethod
    def of_tables(cls, sine: Float[Tensor, "position dims"], cosine: Float[Tensor, "position dims"]) -> "Rotary":
        """What sine and cosine tables of a model tell, as exactly as they do: position 1 turns by the frequencies.

        Raises:
            CallError: the tables have no position 1, or pair dimensions in another way than by halves or neighbours.
        """
        if sine.shape != cosine.shape or sine.shape[0] < 2 or sine.shape[1] % 2:
            raise CallError(
                f"rotary tables should be alike, of two positions or more and of dimensions in pairs, got "
                f"{list(sine.shape)} and {list(cosine.shape)}"
            )
        angles = torch.atan2(upcast(sine[1]), upcast(cosine[1]))
        first, second = angles.chunk(2)
        if torch.equal(first, second):
            return cls(len(angles), "halves", tuple(first.tolist()))
        if torch.equal(angles[::2], angles[1::2]):
            return cls(len(angles), "adjacent", tuple(angles[::2].tolist()))
        raise CallError("rotary tables pair the dimensions neither by halves nor by neighbours")

    def rotate(self, rows: Float[Tensor, "*batch d_head"], offset: int) -> Float64[Tensor, "*batch d_head"]:
        """R(offset) applied to each row, in float64.

        Raises:
            CallError: the frequencies are not known and the offset is not 0, or there are more dimensions than d_head.
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
        """||W_K R(offset) W_Q'||_F for each offset, through two Gram matrices that are formed once.

        The square is tr(W_K'W_K R W_Q'W_Q R'). Beside the Gram matrices an offset costs d_head^2 a head.

        Raises:
            CallError: as `rotate`.
        """
        key_gram, query_gram = gram(W_K), gram(W_Q)
        norms = [
            # R G R': rotate the columns, then the rows; rounding can leave a norm of zero just below it.
            (key_gram * self.rotate(self.rotate(query_gram, offset).mT, offset).mT).sum((-2, -1)).clamp_min(0).sqrt()
            for offset in offsets
        ]
        return torch.stack(norms)

    def _pairs(self, d_head: int) -> tuple[slice, slice]:
        dims = self.dims or 0
        if dims > d_head:
            raise CallError(f"{dims} dimensions should rotate, and a head has {d_head}")
        if self.pairing == "adjacent":
            return slice(0, dims, 2), slice(1, dims, 2)
        return slice(0, dims // 2), slice(dims // 2, dims)

    def _known_frequencies(self) -> tuple[float, ...]:
        if self.frequencies is None:
            raise CallError(
                "the rotary frequencies of this model are not known, so W_QK is known at offset 0 alone; "
                "a config.json beside the weights tells them, or [rotary] with dims and base in a mapping file"
            )
        return self.frequencies
