"""The paper's setting: its data, its four parameterizations, and where gradient flow starts."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar, cast

import numpy as np
from scipy.special import expit, log_expit

from ...circuits.errors import CallError

# e^709 is the largest power that a double can hold. Attention is within 1e-200 of 0 or 1 long before that.
_LARGEST_START = 600.0

Query = Literal["token", "class"]
Scalar = float | int
Numbers = TypeVar("Numbers", float, np.ndarray)


@dataclass(frozen=True)
class Setting:
    """Sequences of m relevant and n background tokens, read at a query token.

    Attributes:
        M: number of classes.
        b: number of class tokens per class. All b M class tokens are orthonormal.
        m: number of tokens of the sequence's own class in a sequence.
        n: number of background tokens in a sequence.
        query: "token": the query is one of the b tokens of the class, independent of the context, as in the paper.
            "class": the query is a unit vector of its own for each class, orthogonal to everything else.

    Raises:
        CallError: a count is not an int with M >= 2, b >= 1, 1 <= m <= b and n >= 1, or the query is unknown.

    Source: the setting of "Faster Query-Key Learning Sharpens Attention". The `class` query was added for this project;
        it changes sigma_qk and K. See docs/theory, model and data.
    """

    M: int
    b: int
    m: int
    n: int
    query: Query = "token"

    def __post_init__(self) -> None:
        """Refuse counts and queries that the theory does not cover."""
        for name, least in (("M", 2), ("b", 1), ("m", 1), ("n", 1)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise CallError(f"Setting: {name} must be an int >= {least}, got {count!r}.")
        if self.m > self.b:
            raise CallError(
                f"Setting: m, the number of class tokens in a sequence, must be at most b = {self.b}, got {self.m}."
            )
        if self.query not in ("token", "class"):
            raise CallError(f'Setting: query must be "token" or "class", got {self.query!r}.')

    @property
    def sigma_ov(self) -> float:
        """Common singular value sqrt(b) of C_OV, where W_OV = mu_OV C_OV."""
        return math.sqrt(self.b)

    @property
    def sigma_qk(self) -> float:
        """Common singular value of C_QK, where W_QK = mu_QK C_QK: b (token query) or sqrt(b) (class query)."""
        return float(self.b) if self.query == "token" else math.sqrt(self.b)

    @property
    def K(self) -> float:  # noqa: N802 (the theory's name)
        """Constant K in dmu_QK/dmu_OV = r K (1 - alpha) mu_OV: (M-1)/(M b) (token) or (M-1)/M (class)."""
        return (self.M - 1) / (self.M * self.b) if self.query == "token" else (self.M - 1) / self.M

    @property
    def uniform_attention(self) -> float:
        """Attention alpha_0 = m/(m+n) on the relevant tokens when mu_QK = 0."""
        return self.m / (self.m + self.n)

    def attention(self, mu_qk: Numbers) -> Numbers:
        """Return the attention on the relevant tokens, alpha = m e^mu_QK / (m e^mu_QK + n)."""
        return expit(mu_qk + math.log(self.m / self.n))

    def background_attention(self, mu_qk: Numbers) -> Numbers:
        """Return the attention on the background tokens, 1 - alpha, to full relative accuracy where alpha is near 1."""
        return expit(-(mu_qk + math.log(self.m / self.n)))

    def loss(self, mu_qk: Numbers, mu_ov: Numbers) -> Numbers:
        """Return the cross-entropy ln(1 + (M-1) e^{-alpha mu_OV}) in nats, which is the same for every sequence."""
        return -log_expit(self.attention(mu_qk) * mu_ov - math.log(self.M - 1))

    def margin(self, loss: Numbers) -> Numbers:
        """Return the right class's logit minus any other's at a loss L, alpha mu_OV = ln((M-1) / (e^L - 1))."""
        # ln(e^L - 1) = L + ln(1 - e^-L) neither overflows at a large L nor cancels at a small one.
        return cast("Numbers", math.log(self.M - 1) - (loss + np.log(-np.expm1(-loss))))


class Parameterization(Enum):
    """Which circuits are trained as products of factors.

    The first pair of letters stands for attention and the second for output, each collapsed (C) or factorized (F):
    CACO is Collapsed Attention, Collapsed Output.

    Source: "Faster Query-Key Learning Sharpens Attention".
    """

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
        """Return the parameterization of a name in upper or lower case.

        Raises:
            CallError: the name is unknown; the message lists the known names.
        """
        try:
            return cls(name.strip().upper())
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise CallError(f"Parameterization {name!r} is not known; expected one of {known}.") from None


@dataclass(frozen=True)
class Start:
    """The scales mu_QK and mu_OV at time 0.

    Attributes:
        mu_qk: scale of W_QK = mu_qk C_QK.
        mu_ov: scale of W_OV = mu_ov C_OV.

    Raises:
        CallError: a scale is not finite, mu_qk exceeds 600 in absolute value, or mu_ov is negative (the loss would
            start above ln M).
    """

    mu_qk: Scalar
    mu_ov: Scalar

    def __post_init__(self) -> None:
        """Refuse scales at which training cannot start."""
        for name in ("mu_qk", "mu_ov"):
            if not math.isfinite(getattr(self, name)):
                raise CallError(f"Start: {name} must be finite, got {getattr(self, name)!r}.")
        if abs(self.mu_qk) > _LARGEST_START:
            raise CallError(
                f"Start: mu_qk must lie between -{_LARGEST_START:g} and {_LARGEST_START:g}, got {self.mu_qk!r}: "
                "e^mu_qk would overflow."
            )
        if self.mu_ov < 0:
            raise CallError(f"Start: mu_ov must be >= 0, got {self.mu_ov!r}.")

    @classmethod
    def default(cls, parameterization: Parameterization) -> "Start":
        """Return the default start of a parameterization: 0 for a collapsed circuit, 0.01 for a factorized one."""
        return cls(
            0.01 if parameterization.factorized_attention else 0.0,
            0.01 if parameterization.factorized_output else 0.0,
        )

    @classmethod
    def checked(cls, start: "Start | None", parameterization: Parameterization) -> "Start":
        """Return the start, or the default for None.

        Args:
            start: the start to check, or None.
            parameterization: which circuits are factorized.

        Raises:
            CallError: a factorized circuit starts at its saddle.
        """
        if start is None:
            return cls.default(parameterization)
        for name, factorized in (
            ("mu_qk", parameterization.factorized_attention),
            ("mu_ov", parameterization.factorized_output),
        ):
            if factorized and getattr(start, name) <= 0:
                raise CallError(
                    f"Start: {name} must be > 0 for {parameterization.value}, got {getattr(start, name)!r}. "
                    f"A factorized circuit moves at a rate proportional to {name}, so gradient flow never leaves the "
                    "saddle at 0; start balanced and aligned at a small positive scale, such as 0.01."
                )
        return start


def check_ratio(r: Scalar) -> float:
    """Return r = eta_QK / eta_OV as a float; raise CallError unless it is positive and finite."""
    if not (math.isfinite(r) and r > 0):
        raise CallError(f"r, the ratio eta_QK / eta_OV of the learning rates, must be positive and finite, got {r!r}.")
    return float(r)


def check_loss(setting: Setting, loss: Numbers, start: Start) -> None:
    """Raise CallError unless every loss is above 0 and below the loss at the start, so that the flow passes it."""
    highest = setting.loss(float(start.mu_qk), float(start.mu_ov))
    values = np.atleast_1d(loss)
    out_of_reach = values[~((values > 0) & (values < highest))]
    if out_of_reach.size:
        raise CallError(
            f"loss {out_of_reach[0]:.6g} is out of reach: gradient flow from mu_qk = {start.mu_qk:g}, "
            f"mu_ov = {start.mu_ov:g} passes every loss between 0 and {highest:.6g}, both excluded."
        )
