"""The paper's setting: its data, its four parameterizations and where gradient flow starts."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar, cast

import numpy as np
from scipy.special import expit, log_expit

from ...circuits.errors import CallError

# e^709 is the largest power that a double holds; attention differs from 0 or 1 by less than 1e-300 long before.
_LARGEST_START = 600.0

Query = Literal["token", "class"]
Scalar = float | int
Numbers = TypeVar("Numbers", float, np.ndarray)


@dataclass(frozen=True)
class Setting:
    """Sequences of m relevant and n background tokens, read at a query token.

    Source: the setting of "Faster Query-Key Learning Sharpens Attention"; the `class` query was added
    for this project (it changes sigma_qk and K).

    Attributes:
        M: number of classes.
        b: class tokens per class, all b M of them orthonormal.
        m: tokens of the sequence's class in a sequence.
        n: background tokens in a sequence.
        query: "token", the query is one of the b tokens of the class, independent of the context (the paper);
            "class", it is a unit vector of its own per class, orthogonal to everything else.

    Raises:
        CallError: a count is no int with M >= 2, b >= 1, 1 <= m <= b, n >= 1, or the query is unknown.
    """

    M: int
    b: int
    m: int
    n: int
    query: Query = "token"

    def __post_init__(self) -> None:
        """Refuse counts and queries for which the theory says nothing."""
        for name, least in (("M", 2), ("b", 1), ("m", 1), ("n", 1)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise CallError(f"Setting: {name} must be an int >= {least}, got {count!r}.")
        if self.m > self.b:
            raise CallError(
                f"Setting: m, tokens of the class in a sequence, must be at most b = {self.b}, got {self.m}."
            )
        if self.query not in ("token", "class"):
            raise CallError(f'Setting: query must be "token" or "class", got {self.query!r}.')

    @property
    def sigma_ov(self) -> float:
        """Singular value sqrt(b) of C_OV, which W_OV = mu_OV C_OV keeps."""
        return math.sqrt(self.b)

    @property
    def sigma_qk(self) -> float:
        """Singular value of C_QK, which W_QK = mu_QK C_QK keeps: b (token query) or sqrt(b) (class query)."""
        return float(self.b) if self.query == "token" else math.sqrt(self.b)

    @property
    def K(self) -> float:  # noqa: N802 (the theory's name)
        """Constant of dmu_QK/dmu_OV = r K (1 - alpha) mu_OV: (M-1)/(M b) (token) or (M-1)/M (class)."""
        return (self.M - 1) / (self.M * self.b) if self.query == "token" else (self.M - 1) / self.M

    @property
    def uniform_attention(self) -> float:
        """Attention alpha_0 = m/(m+n) on the relevant tokens when mu_QK = 0."""
        return self.m / (self.m + self.n)

    def attention(self, mu_qk: Numbers) -> Numbers:
        """Attention on the relevant tokens, alpha = m e^mu_QK / (m e^mu_QK + n)."""
        return expit(mu_qk + math.log(self.m / self.n))

    def background_attention(self, mu_qk: Numbers) -> Numbers:
        """Attention on the background tokens, 1 - alpha, to full relative accuracy where alpha is near 1."""
        return expit(-(mu_qk + math.log(self.m / self.n)))

    def loss(self, mu_qk: Numbers, mu_ov: Numbers) -> Numbers:
        """Cross-entropy ln(1 + (M-1) e^{-alpha mu_OV}), the same for every sequence."""
        return -log_expit(self.attention(mu_qk) * mu_ov - math.log(self.M - 1))

    def margin(self, loss: Numbers) -> Numbers:
        """Logit of the right class over any other at a loss, alpha mu_OV = ln((M-1) / (e^L - 1))."""
        # ln(e^L - 1) = L + ln(1 - e^-L) neither overflows at a large L nor cancels at a small one
        return cast("Numbers", math.log(self.M - 1) - (loss + np.log(-np.expm1(-loss))))


class Parameterization(Enum):
    """Which circuit is trained as a product of factors: Collapsed or Factorized Attention, then Output."""

    CACO = "CACO"
    CAFO = "CAFO"
    FACO = "FACO"
    FAFO = "FAFO"

    @property
    def factorized_attention(self) -> bool:
        """Whether W_QK = W_K W_Q' is trained through W_K and W_Q."""
        return self.value[0] == "F"

    @property
    def factorized_output(self) -> bool:
        """Whether W_OV = W_O W_V is trained through W_O and W_V."""
        return self.value[2] == "F"

    @classmethod
    def parse(cls, name: str) -> "Parameterization":
        """Return the parameterization of that name, in either case; CallError lists the known names."""
        try:
            return cls(name.strip().upper())
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise CallError(f"Parameterization {name!r} is not known; expected one of {known}.") from None


@dataclass(frozen=True)
class Start:
    """The scales mu_QK and mu_OV at time 0.

    Attributes:
        mu_qk: W_QK = mu_qk C_QK.
        mu_ov: W_OV = mu_ov C_OV.

    Raises:
        CallError: a scale is not finite, or mu_ov is negative (the loss would begin above ln M).
    """

    mu_qk: Scalar
    mu_ov: Scalar

    def __post_init__(self) -> None:
        """Refuse scales that no training starts at."""
        for name in ("mu_qk", "mu_ov"):
            if not math.isfinite(getattr(self, name)):
                raise CallError(f"Start: {name} must be finite, got {getattr(self, name)!r}.")
        if abs(self.mu_qk) > _LARGEST_START:
            raise CallError(
                f"Start: mu_qk must be at most {_LARGEST_START:g} in size, got {self.mu_qk!r}: e^mu_qk overflows."
            )
        if self.mu_ov < 0:
            raise CallError(f"Start: mu_ov must be >= 0, got {self.mu_ov!r}.")

    @classmethod
    def default(cls, parameterization: Parameterization) -> "Start":
        """Return 0 for a collapsed circuit, 0.01 for a factorized one."""
        return cls(
            0.01 if parameterization.factorized_attention else 0.0,
            0.01 if parameterization.factorized_output else 0.0,
        )

    @classmethod
    def checked(cls, start: "Start | None", parameterization: Parameterization) -> "Start":
        """Return the start, or the default for None; CallError where a factorized circuit is at a saddle."""
        if start is None:
            return cls.default(parameterization)
        for name, factorized in (
            ("mu_qk", parameterization.factorized_attention),
            ("mu_ov", parameterization.factorized_output),
        ):
            if factorized and getattr(start, name) <= 0:
                raise CallError(
                    f"Start: {name} must be > 0 for {parameterization.value}, got {getattr(start, name)!r}. "
                    f"A factorized circuit moves at a rate proportional to {name}, so 0 is a saddle that "
                    "gradient flow never leaves; start balanced and aligned at a small positive scale, "
                    "such as 0.01."
                )
        return start


def check_ratio(r: Scalar) -> float:
    """Return r = eta_QK / eta_OV as a float; CallError unless it is positive and finite."""
    if not (math.isfinite(r) and r > 0):
        raise CallError(f"r, the ratio eta_QK / eta_OV of the learning rates, must be positive, got {r!r}.")
    return float(r)


def check_loss(setting: Setting, loss: Numbers, start: Start) -> None:
    """CallError unless every loss lies below the loss at the start, where the flow will pass, and above 0."""
    highest = setting.loss(float(start.mu_qk), float(start.mu_ov))
    values = np.atleast_1d(loss)
    out_of_reach = values[~((values > 0) & (values < highest))]
    if out_of_reach.size:
        raise CallError(
            f"loss {out_of_reach[0]:.6g} is out of reach: gradient flow from mu_qk = {start.mu_qk:g}, "
            f"mu_ov = {start.mu_ov:g} passes every loss between 0 and {highest:.6g}, both excluded."
        )
