"""Open a checkpoint and read its attention weights, one layer at a time."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Unpack

from ..architectures.mapping import Mapping, Names
from ..architectures.recognition import Recognised
from ..checkpoints.files import CheckpointFiles
from ..checkpoints.opening import open_weights
from ..checkpoints.sidecars import LOGGED
from ..checkpoints.tensor_file import TensorFile, demand_no_adapters
from ..checkpoints.views.effective import effective
from ..checkpoints.views.wrapped_names import unwrapped
from ..errors import CallError, QkovError, named_input
from ..storage.places import Place
from ..weights.attention_weights import AttentionWeights
from ..weights.source import AttentionSource, StackTensors
from .ahead import read_ahead
from .layer import read_layer
from .not_read import what_is_not_read
from .options import ReadingKeywords, ReadingOptions, reading_options
from .saved_format import is_own, own_mapping, own_scalars


class OpenCheckpoint(AttentionSource):
    """A checkpoint whose tensors are known by name and are read layer by layer.

    Attributes:
        file: The tensors by name.
        recognised: How the architecture was recognised, in words.
        stacks: The mapping of each stack of layers.
        skipped: What is not read, with the reason.
        not_read: What else the file holds, in words by its name.
        doubts: What the file has or lacks against the family, with the facts that are unknown therefore.
    """

    def __init__(self, file: TensorFile, recognised: Recognised) -> None:
        """Find the layers.

        Args:
            file: The tensors by name.
            recognised: The mappings of its stacks.

        Raises:
            QkovError: The file does not hold the tensors that a mapping names.
        """
        self.file = file
        self.address = file.address
        self.tensor_count = len(file.shapes)
        self.config_origin = file.config_origin
        self.recognised = recognised.how
        self.stacks = tuple(
            mapping.with_width_of(*next(iter(mapping.layers(file.shapes).items())), file.shapes)
            for mapping in recognised.stacks
        )
        self.skipped = recognised.skipped | ({} if file.partial is None else {"other files": file.partial})
        self.doubts = recognised.doubts
        self._names = [
            (mapping, layer, names) for mapping in self.stacks for layer, names in mapping.layers(file.shapes).items()
        ]
        used = {name for *_, names in self._names for of_role in names.values() for name in of_role}
        self.not_read = what_is_not_read(file, used)

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return [(mapping.stack, layer) for mapping, layer, _ in self._names]

    def stack_tensors(self, stack: str) -> StackTensors:
        """Return the names and layouts of those tensors of a stack that the file holds."""
        names: dict[str, str] = {}
        layouts: dict[str, str] = {}
        for mapping in (each for each in self.stacks if each.stack == stack):
            roles = {role for of_stack, _, of_layer in self._names if of_stack is mapping for role in of_layer}
            names |= {role: mapping.full_name(name) for role, name in mapping.tensors.items() if role in roles}
            layouts |= mapping.layouts
        return StackTensors(names, layouts)

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers saved beside the weights: what a mapping names, and what the trainer's state logs.

        Raises:
            QkovError: The mapping names a scalar that the file does not hold.
        """
        if is_own(self.file):
            return own_scalars(self.file)
        scalars = {name: float(self.file.training[name]) for name in LOGGED if name in self.file.training}
        for mapping in self.stacks:
            for name, key in mapping.scalars.items():
                if key not in self.file.scalars:
                    held = ", ".join(sorted(self.file.scalars)[:12]) or "none"
                    raise QkovError(
                        f"{self.file.address} has no scalar {key}, which {mapping.origin} names; it has {held}"
                    )
                scalars[name] = self.file.scalars[key]
        return scalars

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield the attention weights of one layer after another, so that no more than one is in memory.

        While a layer of a remote file is in use, the next one is fetched.

        Raises:
            QkovError: A tensor's shape does not fit its layout, or two tensors do not fit each other.
        """
        readings = (partial(self._layer, *key) for key in self._names)
        yield from read_ahead(readings) if self.file.waits else (reading() for reading in readings)

    def _layer(self, mapping: Mapping, layer: int, names: Names) -> AttentionWeights:
        origins = mapping.origin if self.config_origin is None else f"{self.config_origin} and {mapping.origin}"
        try:
            with named_input(self.file.address, f"{origins} describe layer {layer}", "correct what is wrong there"):
                return read_layer(self.file, mapping, layer, names)
        except CallError as error:
            # What the file holds is wrong, not a call.
            raise QkovError(str(error)) from error


def open_checkpoint(
    address: Path | str | Place | CheckpointFiles,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ReadingKeywords],
) -> OpenCheckpoint:
    """Open one checkpoint, a file or a folder, at any address, without building the model.

    The architecture is recognised from the config beside the weights, or else from the names of the tensors.

        open_checkpoint("EleutherAI/pythia-160m@step1000")
        open_checkpoint("model.pt", heads=12)

    Args:
        address: A path, a URL that fsspec knows, a hub id such as "EleutherAI/pythia-160m@step1000", or the files of a
            checkpoint that were found already.
        options: How to read it, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: any field of `ReadingOptions`.

    Raises:
        CallError: There is no such file, or the options do not go together.
        QkovError: The file cannot be read, or its names are not recognised and there is no mapping.
    """
    chosen = reading_options(options, reading)
    return open_tensors(open_weights(address, chosen.trust_pickle), chosen)


def open_tensors(file: TensorFile, options: ReadingOptions) -> OpenCheckpoint:
    """Open tensors that are already known by name, whether they are in a file or in a model.

    Args:
        file: The tensors by name.
        options: How to read them.

    Raises:
        CallError: The options do not go together.
        QkovError: The names are not recognised and there is no mapping.
    """
    stated = options.stated()
    with named_input(file.address, "a checkpoint", "name its tensors in a mapping file (--map FILE.toml)"):
        demand_no_adapters(file.shapes, file.address)
        file = effective(file)
        try:
            if stated is not None:
                return OpenCheckpoint(file, stated)
            if is_own(file):
                return OpenCheckpoint(file, Recognised("as qkov's own format", (own_mapping(file),)))
            file = unwrapped(file)
            return OpenCheckpoint(file, options.recognise(file))
        except QkovError as error:
            _demand_readable(file, error)
            raise


def _demand_readable(file: TensorFile, error: QkovError) -> None:
    """Refuse a file whose tensors are in another form, in place of saying that it has none that are recognised.

    Args:
        file: The file.
        error: Why its layers were not found.

    Raises:
        QkovError: Some of its tensors cannot be read as they are.
    """
    for name, why in file.unread.items():
        if not why.startswith("an object"):
            others = len(file.unread) - 1
            more = f" ({others} more entries are not read)" if others else ""
            raise QkovError(f"{name} of {file.address} is not read, since it is {why}{more}") from error
