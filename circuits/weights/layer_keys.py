"""How a layer of attention is identified, and how it is named in messages and reports."""

#: The stack ("" where there is only one) and the number of the layer in it.
LayerKey = tuple[str, int]


def layer_name(stack: str, layer: object) -> str:
    """Return a layer in words: "layer 3", or "encoder layer 3" in a model with several stacks."""
    return f"{stack} layer {layer}".lstrip()


def layer_label(stack: str, layer: object) -> str:
    """Return a layer's short name for lists of layers: "3", or "encoder 3" in a model with several stacks."""
    return f"{stack} {layer}".lstrip()
