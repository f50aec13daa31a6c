"""Settings that a file holds, in a form that JSON could hold."""

from collections.abc import Mapping as Dictionary
from typing import Any

from .contents import members_of, plain_of
from .module_config import model_type_of, plain_config
from .placeholders import Budget, Placeholder


def as_plain(value: Any, described_by: int) -> Any:
    """Return settings as dictionaries, lists and plain values; what cannot be put so is left out.

    Args:
        value: A dictionary, or the placeholder of an object whose attributes are known.
        described_by: The number of bytes that describe it, which bounds the work.

    Raises:
        DamagedError: The settings hold themselves, or share their content too often.
    """
    if hasattr(value, "to_dict"):
        value = plain_config(value)
    plain = _converted(value, Budget(described_by))
    if isinstance(plain, dict) and isinstance(value, Placeholder) and value.name.startswith("transformers."):
        model_type = model_type_of(value.name)
        return {"model_type": model_type, **plain} if model_type is not None else plain
    return plain


def _converted(value: Any, budget: Budget) -> Any:
    budget.spend(1)
    plain = plain_of(value)
    if value is None or plain is not None:
        return plain
    members = members_of(value)
    if members is None:
        return _NOTHING
    converted = {str(key): _converted(member, budget) for key, member in members.items()}
    kept = {key: member for key, member in converted.items() if member is not _NOTHING}
    return kept if isinstance(value, Dictionary) or not isinstance(value, (list, tuple)) else list(kept.values())


_NOTHING = object()
