"""W'W of wide matrices in numpy, computed in the way that is fastest for the processor's kernels."""

from functools import cache

import numpy as np
from jaxtyping import Float64
from threadpoolctl import ThreadpoolController

#: The number of rows of the product in a panel.
PANEL = 8
#: Up to this many multiplications, OpenBLAS multiplies without packing first on processors with AVX-512.
SMALL_PRODUCT = 100**3
#: Above this rank, packing costs less than panels do.
LARGEST_RANK = 128
_WITH_SMALL_PRODUCTS = {"SkylakeX", "Cooperlake", "SapphireRapids"}


def multiply_by_transpose(
    wide: Float64[np.ndarray, "batch rank long"], out: Float64[np.ndarray, "batch rank rank"]
) -> None:
    """Write wide @ wide' of each matrix to `out`, multiplying only half of it.

    numpy sees that both factors are the same matrix; otherwise the product is computed in panels: some rows of the
    product up to its diagonal, over as much of the length as counts as a small product.

    Args:
        wide: Matrices W' [batch, rank, long].
        out: Where to write the products [batch, rank, rank].
    """
    pieces = _pieces(*wide.shape[1:])
    if pieces == 0:
        np.matmul(wide, wide.mT, out=out)
        return
    batch, rank, long = wide.shape
    cut = wide.reshape(batch, rank, pieces, long // pieces).transpose(2, 0, 1, 3)
    products = out[None] if pieces == 1 else np.zeros((pieces, *out.shape))
    for start in range(0, rank, PANEL):
        stop = min(start + PANEL, rank)
        # The first panel must not be square, or numpy would take both factors for the same matrix.
        width = min(max(stop, PANEL + 4), rank)
        np.matmul(cut[:, :, start:stop], cut[:, :, :width].mT, out=products[:, :, start:stop, :width])
    if pieces > 1:
        np.sum(products, axis=0, out=out)
    for start in range(PANEL, rank, PANEL):
        out[:, :start, start : start + PANEL] = out[:, start : start + PANEL, :start].mT


def _pieces(rank: int, long: int) -> int:
    """Return into how many parts to cut the length so that panels are small products, or 0 for no panels."""
    if not PANEL < rank <= LARGEST_RANK or not _has_small_products():
        return 0
    fewest = -(-PANEL * rank * long // SMALL_PRODUCT)
    return next((pieces for pieces in range(fewest, 2 * fewest + 1) if long % pieces == 0), 0)


@cache
def _has_small_products() -> bool:
    libraries = ThreadpoolController().select(internal_api="openblas").lib_controllers
    return any(library.architecture in _WITH_SMALL_PRODUCTS for library in libraries)
