"""The blocks of models with TransformerLens' module names, and the attention in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from ..errors import CallError
from ..weights.layer_keys import LayerKey

#: The first version whose models are read. It needs transformers 5.9, so that older ones stand beside transformers 4.
OLDEST_TRANSFORMER_LENS = "3.9"
#: Where TransformerLens keeps attention: the stack, names of the list of blocks, names of the attention in a block.
_BLOCKS = (
    ("", ("blocks",), ("attn",)),
    ("encoder", ("encoder_blocks", "encoder"), ("attn", "self_attn")),
    ("decoder", ("decoder_blocks", "decoder"), ("attn", "self_attn")),
    ("decoder cross", ("decoder_blocks", "decoder"), ("cross_attn",)),
)


@dataclass(frozen=True, eq=False)
class HookedBlock:
    """The attention of one layer, and the block around it.

    Attributes:
        stack: Name of the stack; empty if the model has only one.
        layer: Number of the layer.
        block: The block.
        attention: The attention module in it.
        name: The names of the list and of the attention, with {layer} between them.
    """

    stack: str
    layer: int
    block: Any
    attention: Any
    name: str

    @property
    def key(self) -> LayerKey:
        """The stack and the number of the layer."""
        return self.stack, self.layer

    def tensor_name(self, name: str) -> str:
        """Return the name of a tensor of the attention as TransformerLens gives it, such as blocks.0.attn.W_Q."""
        return f"{self.name.format(layer=self.layer)}.{name}"


def demand_known_interface(model: Any) -> None:
    """Refuse a model of a TransformerLens before 3.9, whose weight interface and bridges differ.

    Raises:
        CallError: The model's class comes from such a TransformerLens.
    """
    if all(base.__module__.partition(".")[0] != "transformer_lens" for base in type(model).__mro__):
        return
    installed = version("transformer-lens")
    # A copy that was installed from TransformerLens' repository calls itself 0.0.0.
    if Version("0.0.0") < Version(installed) < Version(OLDEST_TRANSFORMER_LENS):
        raise CallError(
            f"{type(model).__name__} comes from TransformerLens {installed}, but its models are read from version "
            f"{OLDEST_TRANSFORMER_LENS} on; run: pip install -U 'transformer-lens>={OLDEST_TRANSFORMER_LENS}' "
            f"'transformers>=5.9'"
        )


def hooked_blocks(model: Any) -> Iterator[HookedBlock]:
    """Yield every attention that has TransformerLens' names, stack by stack; none if the model has no such blocks."""
    for stack, lists, attentions in _BLOCKS:
        of_list = next((name for name in lists if hasattr(model, name)), None)
        blocks = () if of_list is None else getattr(model, of_list)
        if not hasattr(blocks, "__iter__"):
            continue
        for layer, block in enumerate(blocks):
            of_attention = next((name for name in attentions if hasattr(block, name)), None)
            if of_attention is not None:
                attention = getattr(block, of_attention)
                yield HookedBlock(stack, layer, block, attention, f"{of_list}.{{layer}}.{of_attention}")
