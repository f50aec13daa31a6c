"""The tokeniser that belongs to a model, and how tokens are written for people."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....circuits.errors import QkovError, reason

#: Writes token ids.
Written = Callable[[Sequence[int]], str]


def load_tokeniser(address: Path | str) -> Any:
    """Return the tokeniser beside a model of transformers.

    Args:
        address: a folder, a GGUF file, or a name on the hub.

    Raises:
        QkovError: there is none, or it cannot be loaded.
    """
    import transformers

    path = Path(address)
    is_gguf = path.suffix == ".gguf"
    options = {"gguf_file": path.name} if is_gguf else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(str(path.parent) if is_gguf else str(address), **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise QkovError(
            f"there is no tokeniser at {address} that transformers can load ({reason(error)}); say where it is"
        ) from error


def written(tokeniser: Any | None) -> Written:
    """Return what writes token ids for people: as text by the tokeniser, or as the numbers themselves without one.

    Spaces alone, which nobody would see, are in quotes.
    """

    def write(ids: Sequence[int]) -> str:
        if tokeniser is None:
            return " ".join(map(str, ids))
        text = tokeniser.decode(list(ids))
        return text if text.strip() else repr(text)

    return write
