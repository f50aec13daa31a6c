"""The options that a callback takes for the probe that it creates."""

from inspect import Parameter, signature
from typing import Any

from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords
from ..training.circuit_probe import CircuitProbe


def demand_options(options: dict[str, Any], known_elsewhere: dict[str, str]) -> None:
    """Refuse options that a probe does not have, or that a callback gives it.

    Args:
        options: The options.
        known_elsewhere: The options that the callback gives, and who tells it.

    Raises:
        CallError: An option is one of these.
    """
    for name, owner in known_elsewhere.items():
        if name in options:
            raise CallError(f"{owner} states the {name} of the probe: leave out {name}")
    parameters = signature(CircuitProbe).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
    given = ("model", "store", "every", *known_elsewhere)
    known = [name for name in (*names, *ModelKeywords.__annotations__) if name not in given]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise CallError(f"a CircuitProbe has no option {unknown[0]}; it has {', '.join(known)}")
