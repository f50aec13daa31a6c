"""The mutation run: which faults it makes, that they change results, and that its targets are there."""

from pathlib import Path

import pytest

from .mutation.mutants import mutants
from .mutation.targets import TARGETS

ROOT = Path(__file__).parents[1]

SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 7
class Settings:
    batch_tokens: int = 9
    other: int = field(default=None, init=False)
def f(x: "1 + 1", y=2, *, must, batch_tokens=11) -> int:
    if x < y and not x == 5:
        raise ValueError(f"{x + 1}")
    warn("of", stacklevel=3)
    torch.manual_seed(13)
    return x * -y if x.device.type != "cpu" else y, zip(x, y, strict=True)
'''


def test_each_fault_is_made_once_and_alone():
    made = list(mutants(SOURCE))
    faults = {
        "2 became 3",
        "Lt became LtE",
        "And became Or",
        "x == 5 became not x == 5",
        "Eq became NotEq",
        "5 became 6",
        "Mult became Div",
        "USub became UAdd",
    }
    assert {mutant.fault for mutant in made} == faults
    assert len(made) == len(faults)
    assert len({mutant.source for mutant in made}) == len(made)


def test_a_mutant_computes_something_else():
    (mutant,) = (mutant for mutant in mutants("def f(x):\n    return x * 3\n") if mutant.fault == "Mult became Div")
    names: dict = {}
    exec(mutant.source, names)
    assert names["f"](6) == 2


@pytest.mark.parametrize("module", TARGETS)
def test_targets_are_there_and_have_something_to_mutate(module):
    assert any(mutants((ROOT / module).read_text()))
    for test in TARGETS[module]:
        assert (ROOT / test).is_file()
