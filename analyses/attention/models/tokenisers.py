"""The tokenizer that belongs to a model, and how token ids are written for people."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....circuits.errors import QkovError, named_input
from ...tasks.example import Example

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
        tokeniser = transformers.AutoTokenizer.from_pretrained(str(path.parent) if is_gguf else str(address), **options)
    _demand_vocabulary(tokeniser, path, address)
    return tokeniser


def _demand_vocabulary(tokeniser: Any, path: Path, address: Path | str) -> None:
    """Refuse a tokenizer that transformers has made up where the model's has no file.

    Raises:
        QkovError: The folder has no file of a vocabulary, or the vocabulary has no token that stands for text.
    """
    files = sorted({*getattr(type(tokeniser), "vocab_files_names", {}).values(), "tokenizer.json"} - {None})
    needs_file = bool(getattr(type(tokeniser), "vocab_files_names", None)) and path.is_dir()
    patterns = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.bpe")
    beside = {file.name for pattern in patterns for file in path.glob(pattern)} if needs_file else set()
    others = {name for name in beside if name.endswith((".model", ".tiktoken")) or name.startswith(("tekken", "vocab"))}
    missing = needs_file and not (set(files) & beside or others)
    special = set(tokeniser.all_special_ids)
    if missing or not set(tokeniser.get_vocab().values()) - special:
        raise QkovError(
            f"{address} has no tokenizer (expected one of {', '.join(files)}); save the one that the model was trained "
            f"with there, or give its address (--tokenizer)"
        )


def blank_labels(examples: Sequence[Example], tokeniser: Any) -> int:
    """Return how many examples have a next token as their label that is only white space.

    Args:
        examples: Examples of a language model. Those with continuations have no next token as their label.
        tokeniser: The model's tokenizer.
    """
    labels = Counter(example.label for example in examples if not example.continuations and example.label is not None)
    return sum(count for label, count in labels.items() if not tokeniser.decode([label]).strip())


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
