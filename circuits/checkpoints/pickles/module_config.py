"""The config that a model carries with it."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from typing import Any

from torch import nn

from ...errors import QkovError

_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


def config_of(model: nn.Module, address: str) -> dict[str, Any] | None:
    """Return the config of a model, or of the only model inside it that has one, as in a model wrapped for training.

    Args:
        model: The model.
        address: The model in words, for messages.

    Raises:
        QkovError: Several models inside have a config of their own.
    """
    configs: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        # PEFT's own modules pass on the config of the model inside, or make one up.
        is_wrapper = type(module).__module__.startswith("peft.")
        config = None if is_wrapper or _is_inside(name, configs) else plain_config(getattr(module, "config", None))
        if config is not None:
            configs[name] = config
    if len(configs) > 1:
        named = ", ".join(configs)
        raise QkovError(f"{address} contains several models that have their own config, {named}; open one of them")
    return next(iter(configs.values()), None)


def plain_config(config: Any) -> dict[str, Any] | None:
    """Return a config in a form that JSON could hold; None for an object that is not a config."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Dictionary):
        return None
    return {str(key): value for key, value in config.items() if isinstance(value, _PLAIN)}


def model_type_of(kind: str) -> str | None:
    """Return the model_type of transformers that belongs to the full name of a class of configs, or None.

    The class itself states it, but not its objects, which are all that a pickle holds.
    """
    # transformers is slow to import, and few pickles hold its configs.
    from transformers.models.auto import configuration_auto

    names: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    module, _, name = kind.rpartition(".")
    fitting = [model_type for model_type, config in names.items() if config == name]
    # Several types may share a class; the folder of the class has the name of its own type.
    own = [model_type for model_type in fitting if model_type.replace("-", "_") in module.split(".")]
    return own[0] if len(own) == 1 else fitting[0] if len(fitting) == 1 else None


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(not path or name.startswith(f"{path}.") for path in outer)
