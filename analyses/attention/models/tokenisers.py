"""The tokenizer that belongs to a model, and how token ids are written for people."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....circuits.checkpoints.sidecars import read_config
from ....circuits.errors import QkovError, named_input
from ....circuits.storage.address import place_of
from ....circuits.storage.lens import LensModel, is_lens, lens_model
from ...tasks.example import Example
from .addresses import ModelAddress, model_address

#: Writes token ids as text.
Written = Callable[[Sequence[int]], str]


def load_tokeniser(address: Path | str) -> Any:
    """Return the tokenizer beside a model of transformers.

    Args:
        address: An address as `load_model` takes it: a folder, a GGUF file, a name on the hub, or the folder of a run,
            whose last checkpoint has the tokenizer, or the run's folder itself. TransformerLens' own format names the
            tokenizer in its config.

    Raises:
        QkovError: There is no tokenizer, or transformers cannot load it.
    """
    if is_lens(address) and lens_model(str(address)).in_own_format:
        return _loaded(_named_by(lens_model(str(address))))
    return tokeniser_beside(model_address(address))


def tokeniser_beside(found: ModelAddress) -> Any:
    """Return the tokenizer beside a model whose files were found already; see `load_tokeniser`."""
    try:
        return _loaded(found)
    except QkovError as error:
        if found.run is None:
            raise
        try:
            return _loaded(ModelAddress(found.run))
        except QkovError:
            raise error from None


def _named_by(model: LensModel) -> ModelAddress:
    """Return the tokenizer that the config of a model in TransformerLens' own format names."""
    name = read_config(place_of(f"hf://{model.official}/config.json")).get("tokenizer_name")
    if not isinstance(name, str):
        raise QkovError(f"the config of {model} ({model.official}) names no tokenizer; give one (--tokenizer)")
    return ModelAddress(name)


def _loaded(found: ModelAddress) -> Any:
    import transformers

    with named_input(found.shown, "a tokenizer of transformers", "give the address of the tokenizer"):
        tokeniser = found.loaded_by(transformers.AutoTokenizer.from_pretrained)
    _demand_vocabulary(tokeniser, found)
    return tokeniser


def _demand_vocabulary(tokeniser: Any, found: ModelAddress) -> None:
    """Refuse a tokenizer that transformers has made up where the model's has no file.

    Raises:
        QkovError: The folder has no file of a vocabulary, or the vocabulary has no token that stands for text.
    """
    path = Path(found.name)
    files = sorted({*getattr(type(tokeniser), "vocab_files_names", {}).values(), "tokenizer.json"} - {None})
    needs_file = bool(getattr(type(tokeniser), "vocab_files_names", None)) and path.is_dir() and not found.is_gguf
    patterns = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.bpe")
    beside = {file.name for pattern in patterns for file in path.glob(pattern)} if needs_file else set()
    others = {name for name in beside if name.endswith((".model", ".tiktoken")) or name.startswith(("tekken", "vocab"))}
    missing = needs_file and not (set(files) & beside or others)
    special = set(tokeniser.all_special_ids)
    if missing or not set(tokeniser.get_vocab().values()) - special:
        raise QkovError(
            f"{found.shown} has no tokenizer (expected one of {', '.join(files)}); save the one that the model was "
            f"trained with there, or give its address (--tokenizer)"
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
