"""Circuit rates that a trainer's callback creates when training begins."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, reading_options
from ..rates.circuit_rates import CircuitRates
from ..rates.guard import GuardedBy, ScoreGuard, demand_guard
from ..rates.multipliers import Multipliers, demand_multipliers
from ..training.optimizer_steps import unwrapped


class DeferredRates:
    """The arguments of `CircuitRates`, which are checked at once, and the rates from when training begins.

    Attributes:
        rates: The rates while training goes on.
        guard: What holds the scores, also after training has ended.
    """

    def __init__(
        self,
        qk: Multipliers,
        ov: Multipliers,
        biases: bool,
        options: Any,
        reading: ModelKeywords,
        guard: float | None,
        guard_by: GuardedBy,
    ) -> None:
        """Keep the arguments.

        Args:
            qk: The multiplier of the QK circuit, as for `CircuitRates`.
            ov: The multiplier of the OV circuit.
            biases: Whether the biases learn at the rates of their circuits.
            options: How to read the model, as one object.
            reading: The same as keywords.
            guard: The largest score under which each head is kept; None for no guard.
            guard_by: How it is kept there.

        Raises:
            CallError: A multiplier or the guard is not a finite number above 0, or the options do not go together.
        """
        demand_multipliers(qk, ov)
        if guard is not None:
            demand_guard(guard, guard_by)
        self._limit = guard
        self._guard_by: GuardedBy = guard_by
        self.guard: ScoreGuard | None = None
        self._qk, self._ov, self._biases = qk, ov, biases
        self._options = reading_options(options, dict(reading), ModelKeywords)
        self.rates: CircuitRates | None = None

    def begin(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        """Create the rates.

        Args:
            model: The model.
            optimizers: The optimizers, as they are or inside the wrappers of accelerate.

        Raises:
            CallError: As `CircuitRates` raises it.
            QkovError: No attention is found.
        """
        self.end()
        self.rates = CircuitRates(
            [unwrapped(optimizer) for optimizer in optimizers],
            model,
            self._qk,
            self._ov,
            biases=self._biases,
            guard=self._limit,
            guard_by=self._guard_by,
            options=self._options,
        )
        self.guard = None if self._limit is None else self.rates.guard

    def end(self) -> None:
        """Remove the rates. Calling it again is harmless."""
        if self.rates is not None:
            self.rates.remove()
            self.rates = None


class HoldsRates:
    """A callback that holds circuit rates while training goes on."""

    _deferred: DeferredRates

    @property
    def rates(self) -> CircuitRates:
        """The rates.

        Raises:
            CallError: Training has not begun, or it is over.
        """
        if self._deferred.rates is None:
            raise CallError("the circuit rates hold while training goes on in this process, which is not now")
        return self._deferred.rates

    @property
    def guard(self) -> ScoreGuard:
        """What holds the scores, also after training has ended.

        Raises:
            CallError: They are not held, or training has not begun.
        """
        if self._deferred.guard is None:
            raise CallError("there is no guard: give the callback guard=100.0, and ask for it once training has begun")
        return self._deferred.guard
