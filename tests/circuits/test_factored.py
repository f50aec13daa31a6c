"""The algebra of circuits, compared with the same algebra on dense float64 matrices."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from qkov.circuits import CallError, Circuit
from qkov.circuits.algebra.products import difference_factors, multiply
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(circuit: Circuit) -> np.ndarray:
    left = circuit.left.double().numpy()
    return left if circuit.right is None else left @ circuit.right.double().numpy()


def pair(kind: str) -> tuple[Circuit, Circuit]:
    first = Circuit(random(2, 3, 9, 4), random(2, 3, 4, 7, seed=1))
    second = Circuit(random(3, 9, 2, seed=2), random(1, 2, 7, seed=3))
    collapsed = Circuit.from_collapsed(random(2, 3, 9, 7, seed=4))
    return {
        "both factored": (first, second),
        "second collapsed": (second, collapsed),
        "first collapsed": (collapsed, first),
        "both collapsed": (collapsed, Circuit(random(9, 7, seed=5))),
    }[kind]


KINDS = ("both factored", "second collapsed", "first collapsed", "both collapsed")


@pytest.mark.parametrize("kind", KINDS)
def test_inner_product_and_difference(kind: str) -> None:
    first, second = pair(kind)
    expected = (dense(first) * dense(second)).sum((-2, -1))
    np.testing.assert_allclose(first.inner(second), expected, rtol=1e-12, atol=1e-12)
    difference = first - second
    np.testing.assert_allclose(difference.dense(), dense(first) - dense(second), rtol=0, atol=1e-13)
    assert (difference.right is None) == ("collapsed" in kind)
    if difference.right is not None:
        assert difference.left.shape[-1] == 6
        assert difference.rank_bound == 6


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("moved", ["both", "left", "right"])
def test_difference_of_near_circuits_keeps_its_digits(size: float, moved: str) -> None:
    """The reference is the difference of the products in extended precision, which alone has enough digits."""
    left, right = random(2, 30, 5).double(), random(2, 5, 25, seed=1).double()
    new_left = left + size * random(2, 30, 5, seed=2) if moved != "right" else left
    new_right = right + size * random(2, 5, 25, seed=3) if moved != "left" else right
    wide = [each.numpy().astype(np.longdouble) for each in (new_left, new_right, left, right)]
    wanted = wide[0] @ wide[1] - wide[2] @ wide[3]
    precision = 1e-13 + 100 * float(np.finfo(np.longdouble).eps) / size
    difference = Circuit(new_left, new_right) - Circuit(left, right)
    norm = np.sqrt((wanted**2).sum((-2, -1))).astype(float)
    np.testing.assert_allclose(difference.frobenius_norm(), norm, rtol=precision)
    values = np.linalg.svd((wanted / size).astype(float), compute_uv=False)[:, :10]
    found = difference.singular_values() / size
    np.testing.assert_allclose(found, values, rtol=1e-8 + precision, atol=(1e-8 + precision) * values.max())


@pytest.mark.parametrize(
    ("of_left", "of_right", "of_left_change", "of_right_change"),
    [(1, 1, 1e-9, 1e-3), (1e6, 1e-6, 1e-7, 1.0), (1e-4, 1e5, 1e3, 1e-9), (1.0, 1e-8, 0.0, 1e2), (1e-8, 1.0, 1e2, 0.0)],
)
def test_factors_of_a_difference_give_both_terms_one_weight(of_left, of_right, of_left_change, of_right_change):
    """The two terms (A - M) B and M (B - S) are as far apart in the left factor as in the right one."""
    other_left, right = of_left * random(30, 5).double(), of_right * random(5, 25, seed=1).double()
    left_change = of_left_change * random(30, 5, seed=2).double()
    right_change = of_right_change * random(5, 25, seed=3).double()
    left, other_right = other_left + left_change, right - right_change
    found_left, found_right = difference_factors(left, right, other_left, other_right)
    left_change, right_change = left - other_left, right - other_right
    scale = ((found_left[:, :5] * left_change).sum() / left_change.square().sum()).item() if of_left_change else 1.0
    assert np.log2(scale) == round(np.log2(scale))
    assert torch.equal(found_left, torch.cat([left_change * scale, other_left], dim=1))
    inverse = ((found_right[:5] * right).sum() / right.square().sum()).item()
    assert np.log2(inverse) == round(np.log2(inverse))
    assert torch.equal(found_right, torch.cat([right * inverse, right_change]))
    largest = [part.abs().max().item() for part in (*found_left.split(5, dim=1), *found_right.split(5))]
    if of_left_change and of_right_change:
        assert scale * inverse == 1
        # To the nearest power of two, the ratios agree within a factor of two.
        assert 0.5 <= largest[0] / largest[1] / (largest[2] / largest[3]) <= 2
    elif of_right_change:
        # The first term is zero, so its part of the right factor is as large as the other part.
        assert 0.7 <= largest[2] / largest[3] <= 1.5
    else:
        assert 0.7 <= largest[0] / largest[1] <= 1.5


def test_a_difference_from_zero_is_the_circuit_itself() -> None:
    left, right = random(30, 5).double(), random(5, 25, seed=1).double()
    for first, second in ((left, torch.zeros_like(right)), (torch.zeros_like(left), right)):
        for zero in (Circuit(torch.zeros_like(left), torch.zeros_like(right)), Circuit(first, second)):
            np.testing.assert_allclose((Circuit(left, right) - zero).dense(), left @ right, rtol=1e-13, atol=1e-13)
            np.testing.assert_allclose((zero - Circuit(left, right)).dense(), -left @ right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_circuits_have_a_difference_of_zero(dtype: torch.dtype) -> None:
    left, right = random(3, 30, 5).to(dtype), random(3, 5, 25, seed=1).to(dtype)
    other = left.clone()
    other[1, 2, 3] += 1
    difference = Circuit(other, right) - Circuit(left, right)
    assert difference.frobenius_norm()[[0, 2]].tolist() == [0, 0]
    step = (other[1].double() - left[1].double()).numpy() @ right[1].double().numpy()
    assert difference.frobenius_norm()[1].item() == pytest.approx(np.linalg.norm(step), rel=1e-13)
    assert not difference.singular_values()[[0, 2]].any()
    other[1, 2, 3] = torch.nan
    norms = (Circuit(other, right) - Circuit(left, right)).frobenius_norm()
    assert norms.isnan().tolist() == [False, True, False]


def test_shapes_norms_and_transpose() -> None:
    circuit = Circuit(random(2, 1, 9, 4), random(3, 4, 7, seed=1))
    assert circuit.shape == (2, 3, 9, 7)
    assert circuit.batch_shape == (2, 3)
    assert circuit.rank_bound == 4
    assert Circuit(random(2, 9), random(9, 5)).rank_bound == 2
    assert Circuit(random(7, 5), random(5, 3)).rank_bound == 3
    assert Circuit(torch.ones(0, 4, 3)).batch_shape == (0,)
    assert circuit.mT.shape == (2, 3, 7, 9)
    np.testing.assert_allclose(circuit.dense(), dense(circuit), rtol=0, atol=1e-13)
    np.testing.assert_allclose(circuit.mT.dense(), dense(circuit).swapaxes(-2, -1), rtol=0, atol=1e-13)
    nuclear = np.linalg.svd(dense(circuit), compute_uv=False).sum(-1)
    np.testing.assert_allclose(circuit.nuclear_norm(), nuclear, rtol=1e-12)
    collapsed = Circuit.from_collapsed(random(2, 9, 7))
    assert collapsed.right is None
    assert collapsed.rank_bound == 7
    assert collapsed.shape == (2, 9, 7)
    np.testing.assert_array_equal(collapsed.mT.dense(), dense(collapsed).swapaxes(-2, -1))
    np.testing.assert_allclose(collapsed.nuclear_norm(), np.linalg.norm(dense(collapsed), "nuc", axis=(1, 2)))
    np.testing.assert_allclose(collapsed.frobenius_norm(), np.linalg.norm(dense(collapsed), axis=(1, 2)))


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize(
    "index",
    [1, -1, slice(1), (slice(None), 2), (..., 0), (1, 2), (0, ..., 1), None, torch.tensor([1, 0, 1]), [True, False]],
    ids=str,
)
def test_indexing_reaches_batch_dimensions_only(index: Any, collapsed: bool) -> None:
    circuit = Circuit(random(2, 3, 5, 4)) if collapsed else Circuit(random(2, 1, 5, 2), random(3, 2, 4, seed=1))
    # Indexing the labels of the six matrices cannot mistake a matrix dimension for a batch one.
    labels = np.arange(6).reshape(2, 3)[index.numpy() if isinstance(index, Tensor) else index]
    expected = dense(circuit).reshape(6, 5, 4)[labels]
    chosen = circuit[index]
    np.testing.assert_allclose(chosen.dense(), expected, rtol=0, atol=1e-13)
    assert chosen.batch_shape == labels.shape


def test_indexing_past_the_batch_is_refused() -> None:
    circuit = Circuit(random(2, 5, 3), random(2, 3, 5))
    for index in (2, (0, 0), (..., 0, 0)):
        with pytest.raises(CallError, match=r"batch shape \[2\]"):
            circuit[index]


def test_wrong_factors_are_refused_by_name() -> None:
    with pytest.raises(CallError, match=r"left \[5, 3\] and right \[4, 5\].*\.mT"):
        Circuit(random(5, 3), random(4, 5))
    with pytest.raises(CallError, match=r"batch dimensions \[2\] and \[3\]"):
        Circuit(random(2, 5, 3), random(3, 3, 5))
    with pytest.raises(CallError, match=r"left must be a matrix.*\[5\]"):
        Circuit(random(5))
    with pytest.raises(CallError, match=r"right must be a matrix.*\[0, 5\]"):
        Circuit(random(5, 1), random(0, 5))
    with pytest.raises(CallError, match=r"left must be a tensor of floating type, got torch.int64"):
        Circuit(torch.ones(3, 3, dtype=torch.int64))


def test_circuits_of_different_shapes_are_refused() -> None:
    circuit = Circuit(random(2, 5, 3), random(2, 3, 6))
    for other in (circuit.mT, Circuit(random(3, 5, 6))):
        with pytest.raises(CallError, match=r"difference.*\[2, 5, 6\]"):
            _ = circuit - other
        with pytest.raises(CallError, match=r"inner product.*\[2, 5, 6\]"):
            circuit.inner(other)


def test_narrow_types_mix() -> None:
    first = Circuit(random(6, 2).to(torch.bfloat16), random(2, 5).to(torch.float8_e4m3fn))
    second = Circuit(random(6, 3, seed=1), random(3, 5, seed=2).half())
    np.testing.assert_allclose((first - second).dense(), dense(first) - dense(second), rtol=0, atol=1e-14)
    np.testing.assert_allclose(first.inner(second), (dense(first) * dense(second)).sum(), rtol=1e-12)
    assert first.left.dtype == torch.bfloat16


def test_the_product_is_never_formed() -> None:
    # Dense, each of these would take 320 gigabytes.
    left = torch.eye(200_000, 2) * torch.tensor([3.0, 1.0])
    circuit = Circuit(left, left.mT)
    difference = circuit - Circuit(left[:, :1], left[:, :1].mT)
    np.testing.assert_allclose(circuit.singular_values(), [9, 1], rtol=1e-12)
    np.testing.assert_allclose(circuit.svd().values, [9, 1], rtol=1e-12)
    assert circuit.frobenius_norm().item() == pytest.approx(82**0.5, rel=1e-12)
    assert circuit.inner(difference).item() == pytest.approx(1, rel=1e-12)
    np.testing.assert_allclose(difference.singular_values(), [1, 0, 0], rtol=0, atol=1e-14)


class Products(TorchDispatchMode):
    """Notes how many entries each product of matrices has on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.sizes.append((args[0].numel(), args[1].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "products"), [((300, 64, 64), 3), ((300, 64, 16), 3), ((256, 64, 64), 2), ((3, 1024, 1024), 3)]
)
def test_narrow_factors_are_converted_half_a_million_entries_at_a_time(shape: Any, products: int) -> None:
    """Half a million is 2^19, or 128 matrices of 64 x 64; a matrix with more entries is converted by itself."""
    matrices, rows, inner = shape
    first, second = random(*shape), random(matrices, inner, rows, seed=1)
    with Products() as watched:
        found = multiply(first, second)
    np.testing.assert_allclose(found, first.double().numpy() @ second.double().numpy(), rtol=1e-12, atol=1e-12)
    several = [size for size in watched.sizes if max(size) > rows * inner]
    assert all(max(size) <= 2**19 for size in several)
    assert len(watched.sizes) == (products if inner > 16 else 1)


def test_import_is_light() -> None:
    code = "import sys, qkov.circuits; print(*({'transformers', 'transformer_lens', 'matplotlib'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == ""


@pytest.mark.parametrize("rank", [5, 3])
def test_a_difference_broadcasts_over_batches(rank: int) -> None:
    many = Circuit(random(2, 30, 5).double(), random(2, 5, 25, seed=1).double())
    one = Circuit(random(30, rank, seed=2).double(), random(rank, 25, seed=3).double())
    for first, second in ((many, one), (one, many)):
        wanted = dense(first) - dense(second)
        difference = first - second
        assert difference.rank_bound == 5 + rank
        np.testing.assert_allclose(dense(difference), wanted, rtol=0, atol=1e-12)
        np.testing.assert_allclose(difference.frobenius_norm(), np.linalg.norm(wanted, axis=(-2, -1)), rtol=1e-12)
