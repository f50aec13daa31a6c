"""The type checker of the tests checks every function, also one that is made again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from .type_checks import checked


def made(annotation: Any, default: Any = None) -> Callable[..., Any]:
    def double(values: Any, times: int = 2, other: Any = default) -> Any:
        return values * times if other is default else other

    double.__annotations__ |= {"values": annotation, "return": annotation}
    return jaxtyped(double, typechecker=checked)


@pytest.mark.parametrize("default", [None, 3])
def test_functions_of_the_same_signature_are_checked_each_time(default):
    for _ in range(3):
        double = made(Float[Tensor, "row column"], default)
        assert double(torch.ones(2, 3)).sum() == 12
        with pytest.raises(TypeCheckError, match=r"parameters of .*double"):
            double(torch.ones(2))
        with pytest.raises(TypeCheckError, match="'times'"):
            double(torch.ones(2, 3), "2")
        with pytest.raises(TypeCheckError, match="return value"):
            double(torch.ones(2, 3), other=torch.ones(3))


def test_functions_of_other_annotations_are_checked_by_their_own():
    for _ in range(2):
        assert made(int)(3) == 6
        assert made(str)("ab") == "abab"
        with pytest.raises(TypeCheckError):
            made(int)("ab")
        with pytest.raises(TypeCheckError):
            made(str)(3)


def test_functions_without_defaults_share_a_checker():
    def make() -> Any:
        def function(values: list[int]) -> None: ...

        return function

    def other() -> Any:
        def function(values: list[str]) -> None: ...

        return function

    assert checked(make()) is checked(make())
    assert checked(make()) is not checked(other())
    with pytest.raises(Exception, match="values"):
        checked(make())(["a"])
