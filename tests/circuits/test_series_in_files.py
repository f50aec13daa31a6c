"""Series of checkpoints in one file: lists of state dicts, and dictionaries of them keyed by step or epoch."""

import numpy as np
import pytest
import torch
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.checkpoints.series import element_of, series_in


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"blocks.{layer}.q": torch.full((4, 4), float(10 * number + layer)) for layer in range(2)}


@pytest.mark.parametrize(
    ("saved", "name", "prefixes", "beside", "values", "is_named"),
    [
        (
            {"epochs": [0, 100], "state_dicts": [state(0), state(1)]},
            "state_dicts",
            ("state_dicts.0", "state_dicts.1"),
            {"epochs": (0, 100)},
            {},
            True,
        ),
        (
            [{"step": 5, "model": state(0)}, {"step": 10, "model": state(1)}],
            "",
            ("0", "1"),
            {},
            {"step": (5, 10)},
            True,
        ),
        (
            {"model": state(9), "checkpoints": [state(0), state(1)], "checkpoint_epochs": [100, 200]},
            "checkpoints",
            ("checkpoints.0", "checkpoints.1"),
            {"checkpoint_epochs": (100, 200)},
            {},
            True,
        ),
        ({"step_10": state(0), "step_20": state(1)}, "", ("step_10", "step_20"), {}, {}, True),
        ({0: state(0), 100: state(1)}, "", ("0", "100"), {}, {}, False),
        (
            {"log": {"saved": [{"w": state(0)}, {"w": state(1)}], "steps": np.array([3, 4])}},
            "log.saved",
            ("log.saved.0", "log.saved.1"),
            {"log.steps": (3, 4)},
            {},
            True,
        ),
        ({"layers": [state(0), state(1)]}, "layers", ("layers.0", "layers.1"), {}, {}, False),
    ],
)
def test_a_series_and_what_stands_beside_it(tmp_path, saved, name, prefixes, beside, values, is_named):
    torch.save(saved, tmp_path / "a.pt")
    file = open_weights(tmp_path / "a.pt")
    (series,) = series_in(file)
    assert (series.name, series.prefixes) == (name, prefixes)
    assert (series.beside, series.values, series.is_named) == (beside, values, is_named)
    for number, prefix in enumerate(series.prefixes):
        element = element_of(file, prefix)
        names = sorted(element.shapes)
        read = element.read(names)
        assert [read[each][0, 0].item() for each in names] == [10 * number, 10 * number + 1]


@pytest.mark.parametrize(
    "saved",
    [
        {"model": state(0), "ema": state(1)},
        {"parts": [state(0), {"other": torch.ones(2)}]},
        {"parts": [{"w": torch.ones(2)}, {"w": torch.ones(3)}]},
        {"model": state(0), "optimizer": {"state": {0: state(0), 1: state(1)}}},
        {"w": torch.ones(2)},
    ],
)
def test_what_is_not_a_series(tmp_path, saved):
    torch.save(saved, tmp_path / "a.pt")
    assert series_in(open_weights(tmp_path / "a.pt")) == []
