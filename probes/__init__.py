"""Probes that measure live models in notebooks and training loops, and learning rates for single circuits.

A probe adds hooks to your model, measures as the model runs, and removes its hooks when its block ends. Outputs,
gradients and random numbers stay the same.

    from qkov.probes import AttentionProbe, CircuitProbe, CircuitRates

    with AttentionProbe(model, relevant=tokens == 7) as probe:  # every head's attention
        model(tokens)
    probe.table()

    circuits = CircuitProbe(model, store="my-store", every=100, optimizer=optimizer)  # W_QK and W_OV as it trains
    circuits.step(loss)  # after optimizer.step(): notes the loss

    with CircuitRates(optimizer, model, qk=30.0):  # W_Q and W_K learn 30 times as fast
        train()

The names in groups:

    Attention               AttentionProbe
    Health of attention     AttentionHealth (the scores of every head as it trains), Alarm, ScoreGuard (of CircuitRates)
    Circuits in training    CircuitProbe, log_spaced; CircuitProbeCallback (for the Trainer of transformers),
                            CircuitProbeLightningCallback (for that of Lightning)
    Loggers of training     log_to_tensorboard, log_to_wandb, log_to, LogFilter
    Optimizers              CircuitMuon (Muon of each head, or of the products W_QK and W_OV)
    Learning rates          CircuitRates, circuit_parameter_groups, CircuitParameterGroups
    ... in Trainers         CircuitRatesCallback (for that of transformers), CircuitRatesLightningCallback
"""

from typing import TYPE_CHECKING

from ..circuits.public_names import lazy_face

if TYPE_CHECKING:
    from .attention.probe import AttentionProbe
    from .callbacks.lightning_probe import CircuitProbeLightningCallback
    from .callbacks.lightning_rates import CircuitRatesLightningCallback
    from .callbacks.trainer_probe import CircuitProbeCallback
    from .callbacks.trainer_rates import CircuitRatesCallback
    from .health.alarms import Alarm
    from .health.attention_health import AttentionHealth
    from .optimizers.circuit_muon import CircuitMuon
    from .rates.circuit_rates import CircuitRates
    from .rates.guard import ScoreGuard
    from .rates.parameter_groups import CircuitParameterGroups, circuit_parameter_groups
    from .training.circuit_probe import CircuitProbe
    from .training.log_filter import LogFilter
    from .training.loggers import log_to, log_to_tensorboard, log_to_wandb
    from .training.schedule import log_spaced

__all__ = [
    "Alarm",
    "AttentionHealth",
    "AttentionProbe",
    "CircuitMuon",
    "CircuitParameterGroups",
    "CircuitProbe",
    "CircuitProbeCallback",
    "CircuitProbeLightningCallback",
    "CircuitRates",
    "CircuitRatesCallback",
    "CircuitRatesLightningCallback",
    "LogFilter",
    "ScoreGuard",
    "circuit_parameter_groups",
    "log_spaced",
    "log_to",
    "log_to_tensorboard",
    "log_to_wandb",
]

__getattr__, __dir__ = lazy_face(__name__)
