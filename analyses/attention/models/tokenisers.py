"""The tokenizer that belongs to a model, and how token ids are written for people."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....circuits.errors import named_input

#: Writes token ids as text.
Written = Callable[[Sequence[int]], str]


def load_tokeniser(address: Path | str) -> Any:
    """Return the tokenizer beside a model of transformers.

    Args:
        address: A folder, a GGUF file, or a name on the hub.

    Raises:
        QkovError: There is no tokenizer, or transformers cannot load it.
    """
    import transformers

    path = Path(address)
    is_gguf = path.suffix == ".gguf"
    options = {"gguf_file": path.name} if is_gguf else {}
    with named_input(address, "a tokenizer of transformers", "give the address of the tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(str(path.parent) if is_gguf else str(address), **options)


def written(tokeniser: Any | None) -> Written:
    """Return a function that writes token ids as the tokenizer's text, or as numbers if there is no tokenizer.

    Text that consists only of spaces is put in quotes, so that it can be seen.
    """

    def write(ids: Sequence[int]) -> str:
        if tokeniser is None:
            return " ".join(map(str, ids))
        text = tokeniser.decode(list(ids))
        return text if text.strip() else repr(text)

    return write
