"""AttentionHealth watches the largest scores of every head as a model trains, and says which will pass a limit."""

import math
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError, QkovError
from ...circuits.live.models import open_model
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from ...circuits.weights.score_bound import score_bound
from ..training.failures import Failures
from ..training.optimizer_steps import OptimizerSteps, listed
from ..training.schedule import schedule
from .alarms import Alarm
from .growth import FEWEST
from .history import HeadStates, HealthHistory, Limits, Tell
from .report import report
from .scores import ScoreWatcher


class AttentionHealth:
    """Watches the largest score and the entropy of every head as a model trains, and says what will pass a limit.

        with AttentionHealth(model, optimizer=optimizer) as health:
            train(model, optimizer)
        print(health.report())

    In training that goes wrong, the scores of a few heads often grow long before the loss departs: their softmax has
    then one key left, and their gradients vanish. For each step that is recorded the health holds, head by head,

    | column | |
    |---|---|
    | `max_logit` | the largest score before the softmax in the passes of the step, as `AttentionProbe` takes it |
    | `entropy` | the mean entropy of a query's weights, in nats |
    | `growth` | the growth rho of ln `max_logit` per step: the slope of a least-squares line through the last records |
    | `passes_at` | the step at which `max_logit` passes the limit at this growth; NaN, unknown, if it does not grow |
    | `holding_rate` | the multiple of the rate of W_Q and W_K at which the limit is not passed within the horizon |

    The scores are those of the weights from before the step's update. Only passes that compute gradients count. A score
    is bilinear in W_Q and W_K, so its growth per step is to first order in proportion to their rate, as long as it
    comes from them alone and what the layer reads stays as it is; the multiple is then

        m = ln(limit / score) / (horizon rho), within 0 and 1.

    An alarm is a head whose score has passed the limit, or is at least half of it (`least`) and passes it within the
    horizon at its growth. The scores of healthy training grow as fast at its beginning, when they are small, so that
    with `least=0.0` every run gives alarms.

    Nothing is changed: outputs, gradients and random numbers stay the same to the bit, and a failure while training is
    told once and counted.

    Scores are seen where attention is computed by a fused kernel; a layer that forms its map tells no scores, so that
    its entropy alone is there. Under several processes each sees its own batch, and the first one tells.

    Attributes:
        steps: The number of steps that the model has been trained.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        limit: float = 100.0,
        least: float | None = None,
        every: Any = 1,
        horizon: int = 100,
        window: int = 20,
        kept: int = 1000,
        start: int = 0,
        tell: Tell | None = print,
        on_error: str = "warn",
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Watch from now on.

        Args:
            model: The model that is trained, as `AttentionProbe` takes it.
            optimizer: The optimizer that trains it, or several in a list, whose steps are counted.
            limit: The largest score that is not to be passed.
            least: The smallest score that gives an alarm; half of the limit by default.
            every: The steps to record: every so many steps, these steps, or those for which this function returns True.
            horizon: The number of steps within which a score has to pass the limit for an alarm.
            window: The number of records that growth is read from, at least five.
            kept: The number of records that the table keeps, the last ones.
            start: The number of steps that the model has been trained already.
            tell: Called with a sentence for each step with new alarms; None for none.
            on_error: What to do where a measurement fails during training: "warn" once and go on, or "raise".
            options: How to read the model's weights for `bounds`, as one object.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: No attention was found in the model or it cannot be read, an argument is none of the above, or an
                optimizer trains no parameter of the model.
        """
        limits = limits_of(limit, least, horizon, window, kept)
        if not isinstance(start, Integral) or isinstance(start, bool) or start < 0:
            raise CallError(f"start should be a number of steps, got {start!r}")
        if tell is not None and not callable(tell):
            raise CallError(f"tell should be a function of a sentence, or None, got {tell!r}")
        self._is_due = schedule(every)
        self._options = reading_options(options, reading, ModelKeywords)
        self._failures = Failures(on_error)
        self._watcher = ScoreWatcher(model, self._failures)
        if not self._watcher.gives_scores:
            warnings.warn(
                f"the attention of {self._watcher.name} forms maps, which do not tell the scores that they were formed "
                f"of, so that only entropies are recorded and no alarm is given: load it with fused attention "
                f"(attn_implementation='sdpa')",
                stacklevel=2,
            )
        self._model = model
        self._history = HealthHistory(limits, tell if _is_first() else None)
        self.steps = int(start)
        optimizers = listed(optimizer)
        self._optimizers = OptimizerSteps(_held(optimizers, model), lambda: False, self._step_ended)
        self._optimizers.give(optimizers)
        self._optimizers.watch()
        self._watch_if_due()

    @property
    def failures(self) -> int:
        """How many measurements failed during training."""
        return self._failures.count

    @property
    def alarms(self) -> list[Alarm]:
        """Every alarm so far: a head gives one when it begins to be in danger; `str(alarm)` says it in words."""
        return list(self._history.alarms)

    def table(self) -> pd.DataFrame:
        """Return a row for each head at each of the last recorded steps, with the columns that the class describes."""
        table = self._history.table().drop(columns=["rate", "clip"])
        return table if table["stack"].nunique() > 1 else table.drop(columns="stack")

    def columns(self) -> dict[tuple[str, int, str], dict[str, list[float]]]:
        """Return the last record for `CircuitProbe(..., columns=health.columns)`, which stores it with its own rows.

        Create the health before the probe, so that the step is recorded by then. The columns are `max_logit`,
        `attention_entropy` and `max_logit_growth`, in the rows of QK.
        """
        return {
            key: {name: values for name, values in of_layer.items() if not name.startswith("guard")}
            for key, of_layer in self._history.columns().items()
        }

    def bounds(self) -> pd.DataFrame:
        """Return a bound on the scores of each head that the weights have now, over all inputs: `score_bound`.

        Columns: stack, if there are several, layer, head, bound, unknown. Where the weights give no bound it is NaN,
        and `unknown` is the reason.

        Raises:
            QkovError: The model's weights are not recognised.
        """
        parts = []
        for weights in open_model(self._model, self._options).layers():
            try:
                bound, reason = score_bound(weights), ""
            except QkovError as error:
                bound, reason = torch.full((weights.heads,), torch.nan), str(error)
            at = {"stack": weights.stack, "layer": weights.layer, "head": range(weights.heads)}
            parts.append(pd.DataFrame({**at, "bound": bound.numpy(), "unknown": reason}))
        table = pd.concat(parts, ignore_index=True)
        return table if table["stack"].nunique() > 1 else table.drop(columns="stack")

    def states(self) -> dict[tuple[str, int], HeadStates]:
        """Return the states of the heads at the step that was recorded last, by stack and layer."""
        return self._history.latest

    def report(self) -> str:
        """Return what is known of the heads now, in plain English."""
        return report(self._watcher.name, self._history)

    def __repr__(self) -> str:
        """Say what is watched, and how it stands."""
        return (
            f"AttentionHealth({self._watcher.name}, step {self.steps}, {len(self._history.alarms)} alarms, "
            f"{self.failures} failures)"
        )

    def close(self) -> None:
        """Watch nothing any more, and leave the model as it was. Calling it again is harmless."""
        self._optimizers.close()
        self._watcher.stop()

    def __enter__(self) -> "AttentionHealth":
        """Return the health, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _step_ended(self) -> None:
        self.steps += 1
        with self._failures.told(f"recording the health of attention at step {self.steps}"):
            if self._is_due(self.steps):
                seen = self._watcher.taken()
                if not seen:
                    raise CallError(
                        f"no pass of {self._watcher.name} that computes gradients was seen: call the model that was "
                        f"given, and not a copy of it or a compiled one"
                    )
                self._history.add(self.steps, seen)
            self._watch_if_due()

    def _watch_if_due(self) -> None:
        if self._is_due(self.steps + 1):
            self._watcher.start()
        else:
            self._watcher.stop()


def limits_of(limit: Any, least: Any, horizon: Any, window: Any, kept: Any, name: str = "limit") -> Limits:
    """Return what an alarm is.

    Args:
        limit: The largest score that is not to be passed.
        least: The smallest score that gives an alarm; None for half of the limit.
        horizon: The number of steps within which the limit has to be passed.
        window: The number of records that growth is read from.
        kept: The number of records that are kept.
        name: The name of the limit among the arguments.

    Raises:
        CallError: A number is not possible.
    """
    if not _is_number(limit) or limit <= 0:
        raise CallError(f"{name} should be a finite number above 0, got {limit!r}")
    least = limit / 2 if least is None else least
    if not _is_number(least) or not 0 <= least <= limit:
        raise CallError(f"least should be a number from 0 to the limit of {limit:g}, got {least!r}")
    fewest = {"horizon": 1, "window": FEWEST, "kept": 1}
    for (argument, least_of_it), value in zip(fewest.items(), (horizon, window, kept), strict=True):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least_of_it:
            raise CallError(f"{argument} should be a whole number of at least {least_of_it}, got {value!r}")
    return Limits(float(limit), float(least), int(horizon), int(window), int(kept))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_first() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _held(optimizers: Iterable[Optimizer], model: Any) -> list[tuple[str, Tensor]]:
    """Return those parameters of the model that the optimizers hold, with their names.

    Raises:
        CallError: An optimizer holds none.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: dict[str, Tensor] = {}
    for optimizer in optimizers:
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {names[id(parameter)]: parameter for parameter in every if id(parameter) in names}
        if not own:
            raise CallError(
                f"{type(optimizer).__name__} holds no parameter of {type(model).__name__}: give the optimizer that "
                f"trains it"
            )
        held |= own
    return list(held.items())
