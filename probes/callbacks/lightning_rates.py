"""CircuitRates in the Trainer of Lightning."""

from typing import Any, Unpack

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError, QkovError
from ...circuits.reading.options import ModelKeywords, ReadingOptions
from ..rates.guard import GuardedBy
from ..rates.multipliers import Multipliers
from .deferred_rates import DeferredRates, HoldsRates
from .lightning import callback_class

_Callback: Any = callback_class()
_Base: Any = _Callback or object


class CircuitRatesLightningCallback(HoldsRates, _Base):
    """Creates `CircuitRates` when training starts, for the optimizers of the module, until training ends or fails.

        trainer = lightning.Trainer(callbacks=[CircuitRatesLightningCallback(qk=30.0)])

    The multipliers hold under every schedule, and for each of several processes that train the same model. A run that
    is resumed needs nothing else.

    Attributes:
        rates: The `CircuitRates` while training goes on.
    """

    def __init__(
        self,
        qk: Multipliers = 30.0,
        ov: Multipliers = 1.0,
        *,
        part: str = "",
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
            part: The path of the model within the LightningModule, such as "student", if it holds several.
            biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
            guard: The largest score under which each head is kept, as for `CircuitRates`.
            guard_by: How it is kept there: by a lower "rate", or by a "clip".
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: A multiplier or the guard is not a finite number above 0, or the options do not go together.
            QkovError: Lightning is not installed.
        """
        self._deferred = DeferredRates(qk, ov, biases, options, reading, guard, guard_by)
        self._part = part
        if _Callback is None:
            raise QkovError("Lightning is not installed: pip install lightning")
        super().__init__()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the rates.

        Raises:
            CallError: The module has no such part, or as `CircuitRates` raises it.
            QkovError: No attention is found.
        """
        try:
            model = pl_module.get_submodule(self._part)
        except AttributeError:
            name = type(pl_module).__name__
            raise CallError(f"{name} has no part {self._part!r} in which to find attention: give its path") from None
        self._deferred.begin(model, trainer.optimizers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Remove them."""
        self._deferred.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Remove them."""
        self._deferred.end()
