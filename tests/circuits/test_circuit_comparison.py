"""A circuit compared with itself at another time and with a direction, against dense matrices in float64."""

import pytest
import torch
from qkov.circuits import CallError, Circuit
from qkov.circuits.algebra import comparison
from qkov.circuits.algebra.comparison import Comparison, compare


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def dense(circuit, before, direction):
    """Return the figures from the matrices themselves."""
    C, D, R = (torch.as_tensor(each.dense()).expand(circuit.shape) for each in (circuit, before, direction))
    norm, norm_before, size = (each.flatten(-2).norm(dim=-1) for each in (C, D, R))
    along = (C * R).sum((-2, -1))
    return Comparison(
        norm,
        norm_before,
        (C - D).flatten(-2).norm(dim=-1),
        (C * D).sum((-2, -1)),
        along / size.square(),
        along / (norm * size),
    )


def three(kind):
    torch.manual_seed(0)
    A, B = drawn(3, 12, 4), drawn(3, 4, 9)
    M, N = A + 0.1 * drawn(3, 12, 4), B + 0.1 * drawn(3, 4, 9)
    R, S = drawn(3, 12, 4), drawn(3, 4, 9)
    scale = {"large": 1e6, "small": 1e-6}.get(kind, 1.0)
    circuits = {
        "one head is singular": lambda: ((torch.cat([A[:1] * torch.tensor([1, 1, 0, 0]), A[1:]]), B), (M, N), (R, S)),
        "one head was zero": lambda: ((A, B), (torch.cat([0 * M[:1], M[1:]]), N), (R, S)),
        "one head is zero": lambda: ((torch.cat([0 * A[:1], A[1:]]), B), (M, N), (R, S)),
        "wide inside": lambda: tuple((drawn(3, 3, 6), drawn(3, 6, 5)) for _ in range(3)),
        "of other ranks": lambda: ((A, B), (M, N), (drawn(3, 12, 2), drawn(3, 2, 9))),
        "one direction for all": lambda: ((A, B), (M, N), (drawn(12, 9), None)),
        "heads share a key": lambda: ((A[:1], B), (M[:1], N), (R, S)),
        "transposed in memory": lambda: tuple(
            (left.mT.contiguous().mT, right.mT.contiguous().mT) for left, right in ((A, B), (M, N), (R, S))
        ),
    }.get(kind, lambda: ((scale * A, B), (scale * M, N), (scale * R, S)))()
    return [Circuit(*factors) for factors in circuits]


KINDS = (
    "ordinary",
    "large",
    "small",
    "one head is singular",
    "one head was zero",
    "one head is zero",
    "wide inside",
    "of other ranks",
    "one direction for all",
    "heads share a key",
    "transposed in memory",
)


@pytest.mark.parametrize("kind", KINDS)
def test_figures_equal_those_of_the_dense_matrices(kind):
    circuit, before, direction = three(kind)
    found, wanted = compare(circuit, before, direction), dense(circuit, before, direction)
    for name, value in wanted._asdict().items():
        torch.testing.assert_close(
            getattr(found, name), value, rtol=1e-11, atol=0 if "norm" in name else 1e-12, equal_nan=True, msg=name
        )


def test_factors_are_used_only_where_gram_matrices_are_not_accurate(monkeypatch: pytest.MonkeyPatch):
    heads = []

    def counted(circuit, *others):
        heads.append(circuit.batch_shape.numel())
        return by_factors(circuit, *others)

    by_factors = comparison._by_factors
    monkeypatch.setattr(comparison, "_by_factors", counted)
    for kind, wanted in (("ordinary", []), ("large", []), ("transposed in memory", []), ("one head was zero", [1])):
        heads.clear()
        compare(*three(kind))
        assert heads == wanted, kind


def test_a_change_keeps_its_digits_however_small_it_is():
    """With whole multiples of powers of two the factors are exact; their products would not be."""
    torch.manual_seed(0)
    A, D, B = ((1024 * matrix).round() / 1024 for matrix in (drawn(2, 12, 4), drawn(2, 12, 4), drawn(2, 4, 9)))
    small = 2.0**-29
    found = compare(Circuit(A + small * D, B), Circuit(A, B), Circuit(A, B))
    torch.testing.assert_close(found.change_norm, small * (D @ B).flatten(1).norm(dim=1), rtol=1e-12, atol=0)
    assert torch.equal(compare(Circuit(A, B), Circuit(A, B), Circuit(A, B)).change_norm, torch.zeros(2).double())


def test_a_turn_between_the_factors_is_hardly_a_change():
    """The factors move far, and their product stays: what is left is rounding of the product."""
    torch.manual_seed(0)
    A, B = drawn(2, 12, 4), drawn(2, 4, 9)
    turn = torch.linalg.qr(drawn(4, 4)).Q
    found = compare(Circuit(A @ turn, turn.mT @ B), Circuit(A, B), Circuit(A, B))
    assert (found.change_norm < 1e-13 * found.norm).all()
    torch.testing.assert_close(found.cosine, torch.ones(2).double(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [2.0**300, 2.0**-300])
def test_units_do_not_matter(size):
    circuit, before, direction = three("ordinary")
    wanted = compare(circuit, before, direction)
    found = compare(*(Circuit(size * each.left, each.right) for each in (circuit, before, direction)))
    units = {"scale": 1.0, "cosine": 1.0, "inner": size * size}
    for name, value in wanted._asdict().items():
        torch.testing.assert_close(
            getattr(found, name) / units.get(name, size), value, rtol=1e-12, atol=1e-14, msg=name
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_is_missing_where_it_counts(where, bad):
    circuits = three("ordinary")
    wanted = compare(*circuits)
    left = circuits[where].left.clone()
    left[0, 0, 0] = bad
    circuits[where] = Circuit(left, circuits[where].right)
    found = compare(*circuits)
    depend = {
        0: set(Comparison._fields) - {"norm_before"},
        1: {"norm_before", "change_norm", "inner"},
        2: {"scale", "cosine"},
    }[where]
    for name in Comparison._fields:
        torch.testing.assert_close(getattr(found, name)[1:], getattr(wanted, name)[1:], rtol=1e-12, atol=0)
        if name in depend:
            assert getattr(found, name)[0].isnan(), name
        elif name != "norm_before":
            torch.testing.assert_close(getattr(found, name)[0], getattr(wanted, name)[0], rtol=1e-12, atol=0)


def test_single_precision_is_not_rounded_further():
    circuits = three("ordinary")
    single = [Circuit(each.left.float(), each.right.float()) for each in circuits]
    found, wanted = compare(*single), dense(*single)
    for name, value in wanted._asdict().items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-11, atol=1e-12, msg=name)


def test_other_shapes_are_refused():
    circuit, before, direction = three("ordinary")
    with pytest.raises(CallError, match="the circuit before must have the circuit's shape"):
        compare(circuit, Circuit(drawn(3, 11, 4), drawn(3, 4, 9)), direction)
    with pytest.raises(CallError, match="the direction must have the circuit's shape"):
        compare(circuit, before, Circuit(drawn(12, 8)))
