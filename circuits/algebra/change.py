"""The change of a circuit from a base, such as what adapters make of it: its size, its rank and its spectrum."""

import torch
from torch import Tensor

from .circuit import Circuit
from .products import matrix_norm, upcast

#: The names of what `measure_change` returns, in order.
CHANGE_QUANTITIES = (
    "change_norm",
    "relative_change",
    "spectral_norm",
    "rank",
    "stable_rank",
    "effective_rank",
    "singular_values",
)
#: How many times the rounding of the factors singular values have to exceed to count.
_ROUNDINGS = 4.0


def measure_change(circuit: Circuit, base: Circuit, precision: float | None = None) -> dict[str, Tensor]:
    """Measure the change D = C - C_0 of a circuit from a base, with singular values s_1 >= s_2 >= ...

    | name | unit | formula |
    |---|---|---|
    | `change_norm` | C | norm(D) = (sum s^2)^{1/2} |
    | `relative_change` | | norm(D) / norm(C_0), NaN where C_0 is zero |
    | `spectral_norm` | C | s_1 |
    | `rank` | | the number of s above 4 e norm(A) norm(B), what rounding of the factors of C = A B can make |
    | `stable_rank` | | sum s^2 / s_1^2 |
    | `effective_rank` | | exp(-sum w ln w), w = s / sum s (Roy & Vetterli 2007) |
    | `singular_values` | C | s_1, s_2, ... |

    Norms are Frobenius norms, and the unit C is that of the circuit. D has factors of twice the rank of C, formed from
    the differences of the factors, so that it keeps its digits however small it is; no matrix of the shape of C is
    formed. Where C has the same factors as C_0, the norms and the rank are 0 and the other two ranks NaN; all are NaN
    for a matrix with NaN or infinite entries.

    Args:
        circuit: The circuit C, of any batch shape.
        base: The circuit C_0 of the same shape.
        precision: The relative rounding e of the factors; by default that of the types of those that changed.

    Returns:
        Each quantity by name, a float64 tensor of the circuit's batch shape; `singular_values` has one dimension more.

    Raises:
        CallError: The shapes differ.
    """
    change = circuit - base
    s = change.singular_values()
    of_base = base.frobenius_norm()
    norm, nuclear, largest = torch.linalg.vector_norm(s, dim=-1), s.sum(-1), s[..., 0]
    rounding = (_precision(circuit, base) if precision is None else precision) * _ROUNDINGS * _size(circuit)
    is_known = s.isfinite().all(-1)
    return {
        "change_norm": norm,
        "relative_change": torch.where(of_base > 0, norm / of_base, torch.nan),
        "spectral_norm": largest,
        "rank": (s > rounding[..., None]).sum(-1).to(torch.float64).masked_fill(~is_known, torch.nan),
        "stable_rank": (norm / largest).square(),
        "effective_rank": torch.special.entr(s / nuclear[..., None]).sum(-1).exp(),
        "singular_values": s,
    }


def _size(circuit: Circuit) -> Tensor:
    """Return norm(A) norm(B), or the norm of a collapsed circuit."""
    left = matrix_norm(upcast(circuit.left))
    size = left if circuit.right is None else left * matrix_norm(upcast(circuit.right))
    return size.expand(circuit.batch_shape)


def _precision(circuit: Circuit, base: Circuit) -> float:
    """Return the coarsest rounding of the factors that changed."""
    pairs = ((circuit.left, base.left), (circuit.right, base.right))
    changed = [torch.float64] + [
        one.dtype
        for one, other in pairs
        if one is not None and other is not None and not torch.equal(upcast(one), upcast(other))
    ]
    return max(torch.finfo(dtype).eps for dtype in changed)
