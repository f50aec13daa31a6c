"""CircuitRates in the Trainer of transformers."""

from typing import Any, Unpack

from transformers import TrainerCallback

from ...circuits.architectures.mapping import Mapping
from ...circuits.reading.options import ModelKeywords, ReadingOptions
from ..rates.guard import GuardedBy
from ..rates.multipliers import Multipliers
from .deferred_rates import DeferredRates, HoldsRates


class CircuitRatesCallback(HoldsRates, TrainerCallback):
    """Creates `CircuitRates` when training begins, for the optimizer that the Trainer makes, until training ends.

        trainer = transformers.Trainer(..., callbacks=[CircuitRatesCallback(qk=30.0)])

    The multipliers hold under every `lr_scheduler_type`, and for each of several processes that train the same model.
    A run that is resumed needs nothing else.

    Attributes:
        rates: The `CircuitRates` while training goes on.
    """

    def __init__(
        self,
        qk: Multipliers = 30.0,
        ov: Multipliers = 1.0,
        *,
        biases: bool = False,
        guard: float | None = None,
        guard_by: GuardedBy = "rate",
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Keep the arguments for the rates.

        Args:
            qk: The multiplier of the rate of the QK circuit, as for `CircuitRates`.
            ov: The multiplier of the rate of the OV circuit.
            biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
            guard: The largest score under which each head is kept, as for `CircuitRates`.
            guard_by: How it is kept there: by a lower "rate", or by a "clip".
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: A multiplier or the guard is not a finite number above 0, or the options do not go together.
        """
        self._deferred = DeferredRates(qk, ov, biases, options, reading, guard, guard_by)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Create the rates."""
        self._deferred.begin(kwargs["model"], [kwargs["optimizer"]])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remove them."""
        self._deferred.end()
