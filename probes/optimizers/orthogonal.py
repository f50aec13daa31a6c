"""The orthogonalization of Muon, for a batch of matrices at once."""

import torch
from jaxtyping import Float
from torch import Tensor

#: The coefficients of the quintic iteration, of Jordan et al., "Muon: An optimizer for hidden layers in neural
#: networks" (2024): they raise small singular values fastest and leave all of them between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: The norm by which a matrix is divided is at least this, so that a matrix of zeros stays one.
_SMALLEST_NORM = 1e-7


def orthogonalized(
    matrices: Float[Tensor, "*batch rows columns"], iterations: int = 5, dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*batch rows columns"]:
    """Return about U V' for each matrix U S V', by the iteration of Muon.

    With X the matrix divided by its Frobenius norm, wide rather than tall, each iteration makes it

        X <- a X + (b X X' + c (X X')^2) X,

    which changes the singular values s alone, to a s + b s^3 + c s^5.

    Args:
        matrices: The matrices.
        iterations: The number of iterations.
        dtype: In which type they are computed; that of torch.optim.Muon by default.

    Returns:
        The results, in the type of the matrices.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    X = (matrices.mT if is_tall else matrices).to(dtype)
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=_SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        square = X @ X.mT
        X = a * X + (b * square + c * square @ square) @ X
    return (X.mT if is_tall else X).to(matrices.dtype)
