"""Where training starts: balanced and aligned, spread or unbalanced, at the paper's identity, and at random."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError
from .model import SingleLayerAttention
from .populations import Directions
from .setting import Start


def balanced_factors(
    matrix: Float[Tensor, "rows columns"], d_head: int
) -> tuple[Float[Tensor, "rows d_head"], Float[Tensor, "d_head columns"]]:
    """Return factors A, B with A B = matrix and A'A = B B': A = U S^{1/2}, B = S^{1/2} V', padded with zeros.

    Args:
        matrix: the product, with thin SVD U S V'.
        d_head: inner dimension of the factors.

    Raises:
        CallError: d_head is smaller than the rank of the matrix.
    """
    left, singular_values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = int(torch.linalg.matrix_rank(matrix))
    if d_head < rank:
        raise CallError(f"d_head = {d_head} is too small for a start of rank {rank}; use d_head >= {rank}")
    root = singular_values[:rank].sqrt()
    A = matrix.new_zeros(matrix.shape[0], d_head)
    B = matrix.new_zeros(d_head, matrix.shape[1])
    A[:, :rank] = left[:, :rank] * root
    B[:rank] = root[:, None] * right[:rank]
    return A, B


@torch.no_grad()
def aligned_start(
    model: SingleLayerAttention, directions: Directions, start: Start, imbalance: float = 0.0, spread: float = 0.0
) -> None:
    """Set the weights of every run and head to W_QK = mu_QK C_QK and W_OV = mu_OV C_OV, divided evenly among heads.

    With imbalance s > 0 the factors become A D and D^{-1} B, where ln D runs evenly from 0 to s over the singular
    directions. The products are unchanged, but A'A - B B' is not zero. With spread s > 0 the factors become A E and
    E B, where ln E runs evenly over a range of s. The factors stay balanced, but the singular values, which are all
    equal on the fixed directions, spread over a range of e^{2s} about the same mean: mu is unchanged, and Omega is no
    longer a scalar.

    Args:
        model: the model whose weights are set.
        directions: C_QK and C_OV, from `directions`.
        start: the scales mu_QK and mu_OV.
        imbalance: s of the unbalanced start; 0 keeps the factors balanced.
        spread: s of the spread start; 0 keeps the singular values equal.

    Raises:
        CallError: d_head is smaller than the rank of a direction.

    Source: derived for this project; see docs/theory, starts.
    """
    qk = directions.qk * (start.mu_qk / model.heads)
    ov = directions.ov * (start.mu_ov / model.heads)
    if model.parameterization.factorized_attention:
        W_K, W_Q = _scaled(*balanced_factors(qk, model.get_parameter("W_Q").shape[-1]), imbalance, spread)
        model.get_parameter("W_K").copy_(W_K)
        model.get_parameter("W_Q").copy_(W_Q.T)
    else:
        model.get_parameter("W_QK").copy_(qk)
    if model.parameterization.factorized_output:
        W_O, W_V = _scaled(*balanced_factors(ov, model.get_parameter("W_V").shape[-1]), imbalance, spread)
        model.get_parameter("W_O").copy_(W_O.T)
        model.get_parameter("W_V").copy_(W_V.T)
    else:
        model.get_parameter("W_OV").copy_(ov)


@torch.no_grad()
def identity_start(model: SingleLayerAttention, scale: float = 1e-6) -> None:
    """Set every weight to scale times the identity, as the paper's 50-token runs do.

    A weight that is not square gets `scale` on its main diagonal.

    Args:
        model: the model whose weights are set.
        scale: value on the diagonals.
    """
    for parameter in model.parameters():
        parameter.zero_()
        parameter.diagonal(dim1=-2, dim2=-1).fill_(scale)


@torch.no_grad()
def random_start(model: SingleLayerAttention, seed: int, names: tuple[str, ...] | None = None) -> None:
    """Draw weights as torch.nn.Linear does, uniform in +-1/sqrt(inputs); all runs get the same weights.

    Args:
        model: the model whose weights are set.
        seed: seed of the draw.
        names: names of the parameters to draw; None draws all of them. The paper draws W_QK of CACO, and W_Q and W_K
            of one FAFO run.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs_first = {"W_Q", "W_K", "W_V", "W_O"}
    for name, parameter in model.named_parameters():
        if names is not None and name not in names:
            continue
        inputs = parameter.shape[-2] if name in inputs_first else parameter.shape[-1]
        bound = 1 / math.sqrt(inputs)
        drawn = torch.rand(parameter.shape[1:], generator=generator, dtype=parameter.dtype)
        parameter.copy_(bound * (2 * drawn - 1))


def _scaled(A: Tensor, B: Tensor, imbalance: float, spread: float) -> tuple[Tensor, Tensor]:
    """Return A D E and D^{-1} E B, where D and E act on the singular directions that the factors contain."""
    rank = int((A.norm(dim=0) > 0).sum())
    ln_D, ln_E = torch.zeros(2, A.shape[1], dtype=A.dtype)
    ln_D[:rank] = torch.linspace(0, imbalance, rank, dtype=A.dtype)
    ln_E[:rank] = torch.linspace(0, spread, rank, dtype=A.dtype)
    ln_E[:rank] -= (2 * ln_E[:rank]).exp().mean().log() / 2
    return A * (ln_E + ln_D).exp(), (ln_E - ln_D).exp()[:, None] * B
