"""Open a GGUF file as the model from which it was converted: its names, its orders of weights, its config.

llama.cpp's converter renames tensors, permutes the queries and keys of LLaMA, adds 1 to the gains of Gemma's norms,
separates fused queries, keys and values, and so on. All of this is undone here. Quantised tensors are dequantised as
llama.cpp defines them.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import QkovError, named_input
from ...storage.places import Place
from ..pickles.archives import MappedFile
from ..tensor_file import TensorFile
from .architectures import Converted, architectures
from .config import heads_of, stated_config, width_of_heads
from .conversions import CONVERSIONS
from .elements import elements_of
from .header import Header, read_header
from .metadata import Metadata
from .names import Source, renamed
from .open_facts import open_facts
from .positions import stated_positions

#: What a config calls the number of heads; one without it is not that of the model.
_NAMES_OF_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "text_config")


class GgufFile(TensorFile):
    """A GGUF file, whose tensors are mapped from the disk and dequantised when they are read."""

    def __init__(self, place: Place) -> None:
        """Open the file; a remote file is copied to this machine first, and the copy is removed once it is open.

        Args:
            place: The place of the file.

        Raises:
            QkovError: The package gguf is not installed, the file is damaged, or its architecture is not read.
        """
        super().__init__(place.address)
        _demand_library(place.address)
        self._place, self._version = place, place.version()
        with place.local_copy() as path, named_input(place.address, "a GGUF file"):
            self._content = MappedFile(path)
            header = read_header(self._content)
            self.partial = _part_of_several(header)
            metadata = Metadata(header, place.address)
            self._converted = _converted(metadata)
            self._order = header.order
            self._heads = heads_of(metadata)
            self._sources = renamed(header.tensors, self._converted.names)
            self.shapes = {name: self._shape(source) for name, source in self._sources.items()}
            self._state(metadata, len(header.tensors))
        self.metadata = {name: value for name, value in header.entries.items() if isinstance(value, str)}
        self.config_origin = "the metadata of the GGUF file"

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors by name, dequantised and in the order of transformers.

        Args:
            names: Names of the tensors.

        Raises:
            QkovError: A type of quantisation is not known, or the file was written again since it was opened.
        """
        self._place.demand_version(self._version)
        with named_input(self.address, "a GGUF file"):
            read = {name: self._values(self._sources[name]) for name in names}
        self._place.demand_version(self._version)
        return read

    def take_config(self, table: dict[str, Any], origin: str) -> None:
        """Take the config beside the file if it states the heads; the metadata say more than one without them.

        Args:
            table: The config.
            origin: Where it was found.
        """
        if any(name in table for name in _NAMES_OF_HEADS):
            super().take_config(table, origin)
            self.open_facts = {}

    def _state(self, metadata: Metadata, count: int) -> None:
        """Note the config, and the facts that are left open."""
        config = stated_config(metadata, self._converted, count)
        positions, not_known = stated_positions(
            metadata,
            self._converted,
            width_of_heads(metadata),
            self.shapes,
            lambda name: self._values(self._sources[name]),
        )
        self.config = config | positions
        self.open_facts = open_facts(
            metadata, self._converted, {source.stored.name for source in self._sources.values()}
        )
        if not_known is not None:
            self.open_facts[not_known] = ("rotary",), "in the metadata, so the rotation is not known"

    def _shape(self, source: Source) -> tuple[int, ...]:
        shape = source.stored.shape
        is_matrix = len(shape) == 2 and source.module in ("attn_qkv", "attn_output")
        return shape[::-1] if is_matrix and "transposed" in self._converted.undo else shape

    def _values(self, source: Source) -> Tensor:
        content = np.frombuffer(self._content, dtype=np.uint8)
        values = elements_of(source.stored, content, self._order, self.address)
        for change in self._converted.undo:
            values = CONVERSIONS[change](values, source, self._heads)
        return values


def _converted(metadata: Metadata) -> Converted:
    known = architectures()
    if metadata.architecture not in known:
        raise QkovError(
            f"{metadata.address} holds the architecture {metadata.architecture!r} of GGUF; known are "
            f"{', '.join(known)}; save the model from which it was converted as safetensors, and read that"
        )
    return known[metadata.architecture]


def _part_of_several(header: Header) -> str | None:
    """Return a sentence for a file that is one of several parts of a model, None for a whole one.

    Raises:
        QkovError: It is not the first part, which alone says what model it is.
    """
    count, number = header.value("split.count"), header.value("split.no")
    if type(count) is not int or count < 2:
        return None
    sentence = f"this file is one of {count} parts of a model; join them with llama-gguf-split --merge"
    if "general.architecture" not in header.entries:
        raise QkovError(f"{sentence}, since part {number} does not say which model it is")
    return sentence


def _demand_library(address: str) -> None:
    try:
        import_module("gguf")
    except ImportError as error:
        raise QkovError(f"{address} is a GGUF file, which needs the package gguf: pip install 'qkov[gguf]'") from error
