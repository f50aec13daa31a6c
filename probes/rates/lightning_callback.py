"""CircuitRates in the Trainer of Lightning, which is imported only when a callback is made."""

import functools
import sys
from importlib import import_module
from typing import Any, Unpack

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions
from .circuit_rates import CircuitRates
from .deferred import DeferredRates
from .multipliers import Multipliers

#: The two packages under which Lightning is distributed, whose classes are not the same.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_circuit_rates(
    qk: Multipliers = 30.0,
    ov: Multipliers = 1.0,
    *,
    part: str = "",
    biases: bool = False,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ModelKeywords],
) -> Any:
    """Return a callback for Lightning's Trainer that trains under `CircuitRates`, on the module's optimizers.

        trainer = lightning.Trainer(callbacks=[lightning_circuit_rates(qk=30.0)])

    The multipliers hold under every schedule. The package is `lightning` or `pytorch_lightning`, whichever is in use.

    Args:
        qk: The multiplier of the rate of the QK circuit, as for `CircuitRates`.
        ov: The multiplier of the rate of the OV circuit.
        part: The path of the model within the LightningModule, such as "student", if it holds several.
        biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
        options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: mapping, family, heads or prefix.

    Returns:
        The callback; its attribute `rates` holds the `CircuitRates` while training goes on.

    Raises:
        CallError: A multiplier is not a finite number above 0, the options do not go together, or Lightning is not
            installed.
    """
    return _callback(DeferredRates(qk, ov, biases, options, reading), part)


class _Rates:
    """What the callback does; it is joined with the class of callbacks of the package that is in use."""

    def __init__(self, deferred: DeferredRates, part: str) -> None:
        super().__init__()
        self._deferred, self._part = deferred, part

    def __reduce__(self) -> Any:
        """Make the class anew where the callback is sent to another process."""
        return _callback, (self._deferred, self._part)

    @property
    def rates(self) -> CircuitRates:
        """The rates.

        Raises:
            CallError: Training has not begun, or it is over.
        """
        return self._deferred.rates

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the rates."""
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


def _callback(deferred: DeferredRates, part: str) -> Any:
    return _joined(_class_of_callbacks())(deferred, part)


@functools.cache
def _joined(base: type) -> Any:
    return type("LightningCircuitRates", (_Rates, base), {})


def _class_of_callbacks() -> type:
    """Return that of the package that is imported already, or else of the one that is installed."""
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(package).Callback
        except ModuleNotFoundError:
            continue
    raise CallError("Lightning is not installed here: pip install lightning")
