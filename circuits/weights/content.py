"""The content of a layer's attention tensors: a hash of their values, and a sketch from which distances follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import xxhash
from jaxtyping import Float64
from torch import Tensor

from ..algebra.products import at_home
from .attention_weights import BIASES, NAMES, AttentionWeights
from .source import AttentionSource, StackTensors

#: The number of entries of a sketch: a prime, so that no width of a head or a model is in step with it. A distance
#: that is estimated from it has a relative standard deviation of (2 * 251)^(-1/2), or 4.5 %.
SKETCH_SIZE = 251
#: The number of rows of random signs; what has more than 1024 * 251 entries uses them again, all with one more sign.
_ROWS = 1024


@dataclass(frozen=True, eq=False)
class LayerContent:
    """What the attention tensors of a layer hold, in a few bytes.

    Attributes:
        stack: The stack of the layer.
        layer: The number of the layer.
        shapes: The shapes of the weights in words, such as "W_Q 12 x 768 x 64, W_K 12 x 768 x 64".
        digest: A hash of the values of the weights and biases. It depends on neither the file format, the names of the
            tensors nor their floating type: two layers have the same digest if and only if all their values are equal
            to the bit, up to a collision of the hash.
        sketch: A random projection of the weights, without the biases. The same projection is used everywhere, so that
            the norm of the difference of two sketches estimates the Frobenius distance of the weights.
    """

    stack: str
    layer: int
    shapes: str
    digest: str
    sketch: Float64[Tensor, " group"]


def layer_content(weights: AttentionWeights) -> LayerContent:
    """Return the content of a layer's weights as they were read.

    The hash is taken over W_Q, W_K, W_V and W_O [head, ...] (or collapsed circuits) and their biases, whose values are
    widened to float32, or to float64 where float32 does not hold them. Norms are not part of it.
    """
    # Ten times as fast as a cryptographic hash, which would take a third of the time of measuring.
    digest = xxhash.xxh3_128()
    shapes = []
    sketch, sketched = torch.zeros(SKETCH_SIZE, dtype=torch.float64), 0
    for position, name in enumerate((*NAMES, *BIASES)):
        tensor = getattr(weights, name)
        if tensor is None:
            continue
        shape = f"{name} {' x '.join(map(str, tensor.shape))}"
        digest.update(shape.encode())
        if name in NAMES:
            shapes.append(shape)
        flips = _flips(position)
        for matrix in at_home(tensor):
            values = _widened(matrix)
            digest.update(str(values.dtype).encode())
            digest.update(values.numpy().data)
            if name in NAMES:
                # Each matrix goes on where the last one ended, so that small ones do not share their groups.
                sketch += _sketched(values.flatten(), flips).roll(sketched % SKETCH_SIZE)
                sketched += values.numel()
    return LayerContent(weights.stack, weights.layer, ", ".join(shapes), digest.hexdigest(), sketch)


class ContentRecorder(AttentionSource):
    """A source of layers that notes the content of each layer as it is read from another source.

    Attributes:
        source: The other source.
        contents: The content of the layers that were read so far, by stack and number.
    """

    def __init__(self, source: AttentionSource) -> None:
        """Wrap a source; nothing is read yet."""
        self.source = source
        self.address = source.address
        self.recognised = source.recognised
        self.skipped = source.skipped
        self.tensor_count = source.tensor_count
        self.config_origin = source.config_origin
        self.contents: dict[tuple[str, int], LayerContent] = {}

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return self.source.layer_keys

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers that come with the weights, such as the loss."""
        return self.source.scalars

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield one layer after another, and note its content."""
        for weights in self.source.layers():
            self.contents[weights.stack, weights.layer] = layer_content(weights)
            yield weights

    def stack_tensors(self, stack: str) -> StackTensors:
        """Return the names and layouts of the tensors of a stack."""
        return self.source.stack_tensors(stack)


def _widened(matrix: Tensor) -> Tensor:
    """Return the values in float32 if it holds all of them, otherwise in float64, one after another in memory."""
    short = matrix.to(torch.float32)
    if matrix.dtype == torch.float64 and not bool(((short == matrix) | matrix.isnan()).all()):
        short = matrix
    return short.contiguous()


def _sketched(values: Tensor, flips: Iterator[float]) -> Float64[Tensor, " group"]:
    """Return the sum of the entries with random signs, in `SKETCH_SIZE` groups of every 251st entry."""
    sketch = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    signs = _signs()
    for start in range(0, len(values), _ROWS * SKETCH_SIZE):
        part = values[start : start + _ROWS * SKETCH_SIZE]
        rows = -(-len(part) // SKETCH_SIZE)
        table = torch.nn.functional.pad(part, (0, rows * SKETCH_SIZE - len(part))).view(rows, SKETCH_SIZE)
        # A product with a sign is exact in any type; only the sum needs float64.
        sketch += next(flips) * (table * signs[:rows]).sum(0, dtype=torch.float64)
    return sketch


@cache
def _signs() -> Tensor:
    """Signs that are the same on every machine: numpy promises the stream of its bit generators, not of its draws."""
    bits = np.unpackbits(np.random.PCG64(251).random_raw(_ROWS * SKETCH_SIZE // 64).view(np.uint8))
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1).view(_ROWS, SKETCH_SIZE)


def _flips(position: int) -> Iterator[float]:
    """Yield the signs of the parts of a tensor; tensors at different positions have signs of their own."""
    stream = np.random.PCG64([251, position])
    while True:
        yield 1.0 if stream.random_raw() & 1 else -1.0
