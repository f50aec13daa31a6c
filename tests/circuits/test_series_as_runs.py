"""A file that holds several checkpoints is a run: a list of state dicts, or a dictionary keyed by step or epoch."""

from pathlib import Path

import pytest
import torch
from qkov.circuits import CallError, Circuit, ReadingOptions, open_checkpoint, read_mapping
from qkov.circuits.checkpoints import torch_file
from qkov.circuits.checkpoints.pickles import archives
from qkov.circuits.checkpoints.runs import Run, find_run


def matrices(seed: int) -> dict[str, torch.Tensor]:
    """A layer with TransformerLens' names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"Q": (2, 6, 3), "K": (2, 6, 3), "V": (2, 6, 3), "O": (2, 3, 6)}
    return {
        f"blocks.0.attn.W_{name}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def checked(run: Run, expected: dict[int, int], options: ReadingOptions | None = None) -> str:
    """Compare the W_QK of every checkpoint with that of the seed it was made from, and return what steps count."""
    assert [checkpoint.step for checkpoint in run.checkpoints] == list(expected)
    for checkpoint, seed in zip(run.checkpoints, expected.values(), strict=True):
        (weights,) = open_checkpoint(checkpoint.files, options).layers()
        state = matrices(seed)
        W_QK = Circuit(state["blocks.0.attn.W_K"], state["blocks.0.attn.W_Q"].mT)
        torch.testing.assert_close(weights.qk().dense(), W_QK.dense(), rtol=1e-12, atol=1e-12)
    return run.checkpoints[0].unit


@pytest.mark.parametrize(
    ("content", "expected", "unit"),
    [
        ({"epochs": [0, 100], "state_dicts": [matrices(1), matrices(2)]}, {0: 1, 100: 2}, "epoch"),
        ([{"step": 0, "model": matrices(1)}, {"step": 50, "model": matrices(2)}], {0: 1, 50: 2}, "step"),
        ([{"epoch": 1, "global_step": 9, "model": matrices(1)}, {"epoch": 2, "global_step": 18, "model": matrices(2)}],
         {9: 1, 18: 2}, "step"),
        ({"checkpoints": {100: matrices(2), 20: matrices(1)}}, {20: 1, 100: 2}, "step"),
        ({"by_epoch": {3: matrices(1), 7: matrices(2)}}, {3: 1, 7: 2}, "epoch"),
        ({"run": {"steps": {"step_5": matrices(1), "step_10k": matrices(2)}}}, {5: 1, 10_000: 2}, "step"),
        ({"snapshots": [matrices(3), matrices(1), matrices(2)], "snapshot_steps": torch.tensor([30, 10, 20])},
         {10: 1, 20: 2, 30: 3}, "step"),
    ],
)  # fmt: skip
def test_a_series_in_one_file_is_a_run(tmp_path, content, expected, unit):
    """R10: no tensor was found in such files, or they were refused."""
    torch.save(content, tmp_path / "series.pt")
    run = find_run(tmp_path / "series.pt")
    assert checked(run, expected) == unit
    assert len({checkpoint.fingerprint() for checkpoint in run.checkpoints}) == len(expected)


def test_a_series_beside_the_final_model(tmp_path):
    """R10: the final model was measured, and the list was dropped without a word."""
    content = {"model": matrices(9), "checkpoints": [matrices(1), matrices(2)], "checkpoint_epochs": [100, 200]}
    torch.save(content, tmp_path / "m.pt")
    run = find_run(tmp_path / "m.pt")
    assert checked(run, {100: 1, 200: 2}) == "epoch"
    assert run.left_out == {"model": "is beside checkpoints in the file, and is read alone with --prefix model"}
    alone = ReadingOptions(prefix="model")
    (checkpoint,) = find_run(tmp_path / "m.pt", series=alone.series).checkpoints
    assert checkpoint.step is None
    (weights,) = open_checkpoint(checkpoint.files, alone).layers()
    torch.testing.assert_close(weights.W_Q, matrices(9)["blocks.0.attn.W_Q"], rtol=0, atol=0)


def test_a_list_whose_steps_are_not_stated_is_named(tmp_path):
    torch.save({"model": matrices(9), "checkpoints": [matrices(1), matrices(2)]}, tmp_path / "m.pt")
    run = find_run(tmp_path / "m.pt")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [None]
    assert "holds 2 state dicts whose steps are not stated" in run.left_out["checkpoints"]
    torch.save({"state_dicts": [matrices(1), matrices(2)]}, tmp_path / "only.pt")
    with pytest.raises(CallError, match=r"state_dicts holds 2 state dicts .* prefix = .state_dicts.\{step\}") as caught:
        find_run(tmp_path / "only.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [{0: matrices(1), 1: matrices(2)}, {"models": [matrices(1), matrices(2)]}, [matrices(1), matrices(2)]],
)
def test_what_may_be_an_ensemble_is_not_a_run(tmp_path, content):
    torch.save(content, tmp_path / "m.pt")
    run = find_run(tmp_path / "m.pt")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [None]


def mapping_file(path: Path, *lines: str) -> Path:
    roles = [f'{role} = "blocks.{{layer}}.attn.W_{role}"' for role in "QKVO"]
    path.write_text("\n".join([*lines, 'layout = "transformer_lens"', "[tensors]", *roles]))
    return path


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ({"when": [5, 25], "weights": [matrices(1), matrices(2)]}, ('prefix = "weights.{step}"', 'steps = "when"')),
        ({"a": {"b": {5: {"m": matrices(1)}, 25: {"m": matrices(2)}}}}, ('prefix = "a.b.{step}.m"',)),
        ({5: matrices(1), 25: matrices(2)}, ('prefix = "{step}"',)),
    ],
)
def test_a_mapping_tells_where_the_series_is(tmp_path, content, lines):
    torch.save(content, tmp_path / "m.pt")
    options = ReadingOptions(mapping=read_mapping(mapping_file(tmp_path / "map.toml", *lines)))
    assert checked(find_run(tmp_path / "m.pt", series=options.series), {5: 1, 25: 2}, options) == "step"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (('prefix = "other.{step}"',), "holds no list or dictionary of state dicts called 'other'; it holds 'weights'"),
        (
            ('prefix = "weights.{step}"', 'steps = "none"'),
            "holds no list called 'none'; expected the steps of 2 state dicts",
        ),
        (('prefix = "weights.{step}"', 'steps = "names"'), "holds something else than whole numbers"),
        (('prefix = "weights.{step}"',), "whose steps are not stated"),
    ],
)
def test_a_mapping_that_does_not_fit_the_file(tmp_path, lines, message):
    torch.save({"names": ["a", "b"], "weights": [matrices(1), matrices(2)]}, tmp_path / "m.pt")
    options = ReadingOptions(mapping=read_mapping(mapping_file(tmp_path / "map.toml", *lines)))
    with pytest.raises(CallError, match=message) as caught:
        find_run(tmp_path / "m.pt", series=options.series)
    assert "\n" not in str(caught.value)


def test_steps_need_a_prefix_with_a_place_for_them(tmp_path):
    for lines in (('steps = "epochs"',), ('prefix = "a{step}"',)):
        with pytest.raises(CallError, match=r"\{step\}"):
            read_mapping(mapping_file(tmp_path / "map.toml", *lines))


def test_the_file_of_a_series_is_opened_once_while_it_is_in_use(tmp_path, monkeypatch):
    torch.save({"steps": [1, 2, 3], "state_dicts": [matrices(seed) for seed in (1, 2, 3)]}, tmp_path / "m.pt")
    checkpoints = find_run(tmp_path / "m.pt").checkpoints
    opened = []
    load = archives.load_archive

    def counted(*arguments, **keywords):
        opened.append(arguments)
        return load(*arguments, **keywords)

    monkeypatch.setattr(torch_file, "load_archive", counted)
    held = [open_checkpoint(checkpoint.files) for checkpoint in checkpoints]
    assert len(held) == 3
    assert len(opened) == 1
