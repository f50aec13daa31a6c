"""How a checkpoint is to be read, and opening it so."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..architectures.mapping import Mapping
from ..architectures.recognition import Recognised, recognise
from ..checkpoints.files import CheckpointFiles
from ..checkpoints.opening import open_weights
from ..checkpoints.tensor_file import TensorFile, demand_no_adapters
from ..checkpoints.wrapped_names import unwrapped
from ..errors import CallError
from ..storage.places import Place
from .checkpoint import OpenCheckpoint
from .saved_format import is_own, own_mapping


@dataclass(frozen=True)
class ReadingOptions:
    """How to read a checkpoint, where that is not left to what is recognised."""

    mapping: Mapping | None = None
    family: str | None = None
    heads: int | None = None
    prefix: str | None = None
    trust_pickle: bool = False

    def open(self, address: Path | str | Place | CheckpointFiles) -> OpenCheckpoint:
        """Open a checkpoint so.

        Raises:
            CallError: there is no such file, or the options do not go together.
            QkovError: the file cannot be read, or its names are not recognised.
        """
        file = open_weights(address, self.trust_pickle)
        demand_no_adapters(file.shapes, file.address)
        stated = self.stated()
        if stated is not None:
            return OpenCheckpoint(file, stated)
        if is_own(file):
            return OpenCheckpoint(file, Recognised("as qkov's own format", (own_mapping(file),)))
        file = unwrapped(file)
        return OpenCheckpoint(file, self.recognise(file))

    @property
    def are_given(self) -> bool:
        """Whether anything is said of the architecture."""
        return any(option is not None for option in (self.mapping, self.family, self.heads, self.prefix))

    def stated(self) -> Recognised | None:
        """Return what the mapping says, where there is one: nothing is recognised then.

        Raises:
            CallError: it is none, or there are others of `family`, `heads` and `prefix` beside it.
        """
        if self.mapping is None:
            return None
        if not isinstance(self.mapping, Mapping):
            got = type(self.mapping).__name__
            raise CallError(f"mapping should be a Mapping, as read_mapping(path) gives it, got {got}")
        if replace(self, mapping=None).are_given:
            raise CallError("a mapping says family, prefix and heads itself; give them there, not beside it")
        return Recognised(f"by {self.mapping.origin}", (self.mapping,))

    def recognise(self, file: TensorFile) -> Recognised:
        """Recognise the tensors of a file, as `recognition.recognise` does with these options."""
        return recognise(file, self.family, self.heads, self.prefix)

    def settings(self) -> dict[str, Any]:
        """Return what decides the figures, as JSON can hold it."""
        mapping = self.mapping
        stated = None
        if mapping is not None:
            stated = {
                "tensors": mapping.tensors,
                "layouts": mapping.layouts,
                "heads": mapping.heads,
                "prefix": mapping.prefix,
                "facts": mapping.facts.table,
                "scalars": mapping.scalars,
                "stack": mapping.stack,
            }
        return {"mapping": stated, "family": self.family, "heads": self.heads, "prefix": self.prefix}


def open_checkpoint(
    address: Path | str,
    mapping: Mapping | None = None,
    *,
    family: str | None = None,
    heads: int | None = None,
    prefix: str | None = None,
    trust_pickle: bool = False,
) -> OpenCheckpoint:
    """Open one checkpoint, a file or a folder, here or at any address, without building the model.

    Its architecture is recognised from the config beside the weights, else from the names of the tensors.

    Args:
        address: a path, a URL that fsspec knows, or a hub id such as "EleutherAI/pythia-160m@step1000".
        mapping: says which tensors to read; nothing is recognised then.
        family: of the architecture, in place of what would be recognised.
        heads: number of query heads, where neither config nor shapes tell it.
        prefix: of the tensor names, where they are there under several.
        trust_pickle: let the file run the code that it names. Only for files whose origin is known.

    Raises:
        CallError: there is no such file, or the options do not go together.
        QkovError: the file cannot be read, or its names are not recognised and no mapping was given.
    """
    return ReadingOptions(mapping, family, heads, prefix, trust_pickle).open(address)
