"""A step is told, read or unknown; never a number that happens to stand in a name."""

import json
from pathlib import Path

import pytest
import torch
from qkov.circuits import CallError, find_checkpoints, open_checkpoint, read_mapping
from qkov.circuits.checkpoints.runs import find_run
from qkov.circuits.checkpoints.steps.names import step_in
from qkov.circuits.checkpoints.steps.numbers import whole_number
from safetensors.torch import save_file


def matrices(seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer with TransformerLens' names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"Q": (2, 6, 3), "K": (2, 6, 3), "V": (2, 6, 3), "O": (2, 3, 6)}
    return {
        f"blocks.0.attn.W_{name}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def save(path: Path, **values) -> None:
    """Save a layer as training scripts do, with values beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": matrices(), **values} if values else matrices(), path)


def steps(run) -> list[int | None]:
    return [checkpoint.step for checkpoint in find_checkpoints(run)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500", 500),
        ("000500", 500),
        ("10k", 10_000),
        ("1.5k", 1500),
        ("2K", 2000),
        ("1M", 1_000_000),
        ("0.25M", 250_000),
        ("1e5", 100_000),
        ("2.5e3", 2500),
        ("10,000", 10_000),
        ("1,000,000", 1_000_000),
        ("10,00", None),
        ("0.5", None),
        ("2.0", None),
        ("1.2345k", None),
        ("3B", None),
        ("160m", None),
        ("7b", None),
        ("1e99999999", None),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", None),
        ("", None),
    ],
)
def test_numbers_are_understood_as_people_write_them_or_not_at_all(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("name", "step", "unit"),
    [
        ("model_step_1000.pt", 1000, "step"),
        ("pythia-70m-step3000", 3000, "step"),
        ("global_step9", 9, "step"),
        ("modelStep12", 12, "step"),
        ("rl_model_1000_steps", 1000, "step"),
        ("step_10k.pt", 10_000, "step"),
        ("step=1e5.ckpt", 100_000, "step"),
        ("step-10,000.pt", 10_000, "step"),
        ("stage1-step1000-tokens4B", 1000, "step"),
        ("step_1000_0.52.pt", 1000, "step"),
        ("step_100_seed3.pt", 100, "step"),
        ("ckpt-epoch=3-step=400.ckpt", 400, "step"),
        ("iter_0000200", 200, "step"),
        ("checkpoint-500", 500, "step"),
        ("ckpt_1_loss_0.52.pt", 1, "step"),
        ("epoch_3.pt", 3, "epoch"),
        # Numbers of other things.
        ("gpt2.pt", None, None),
        ("model_v2.pt", None, None),
        ("model_seed3.pt", None, None),
        ("fold4.pt", None, None),
        ("pythia-160m", None, None),
        ("model_12l.pt", None, None),
        ("2024-01-15.pt", None, None),
        ("model_000500.pt", None, None),
        ("timestep_5.pt", None, None),
        ("stepsize_3.pt", None, None),
        # A word for a step beside a number that is something else, or is not clear.
        ("checkpoint-7b", None, None),
        ("checkpoint-160m", None, None),
        ("ckpt-10M.pt", None, None),
        ("ckpt-3B-tokens", None, None),
        ("checkpoint_20240115.pt", None, None),
        ("checkpoint-2024-01-15.pt", None, None),
        ("checkpoint_1699999999.pt", None, None),
        ("step_3_400.pt", None, None),
        ("step_10_000.pt", None, None),
        ("step=-1.ckpt", None, None),
        ("step_0.5.pt", None, None),
        ("step_99999999999999999999.pt", None, None),
        ("ckpt_3fa9.pt", None, None),
        ("epoch_12-31.pt", None, None),
        ("epoch_2_of_10.pt", 2, "epoch"),
        ("step-100-of-1000.pt", 100, "step"),
    ],
)
def test_a_name_states_a_step_by_a_word_for_it(name, step, unit):
    stated = step_in(name)
    assert (stated and (stated.number, stated.unit)) == (step and (step, unit))


@pytest.mark.parametrize(
    "names",
    [
        ["model_seed1.pt", "model_seed2.pt", "model_seed3.pt"],
        ["v3_fold0.pt", "v3_fold1.pt", "v3_fold4.pt"],
        ["step_100_seed1.pt", "step_200_seed2.pt"],
        ["trial_1_ckpt_10.pt", "trial_2_ckpt_20.pt"],
        ["stage1-step100.pt", "stage2-step200.pt"],
        ["step_10_rank0.pt", "step_10_rank1.pt"],
        ["ckpt-1-of-3.pt", "ckpt-2-of-3.pt", "ckpt-3-of-3.pt"],
    ],
)
@pytest.mark.parametrize("values", [{}, {"iter_num": 5}])
def test_models_that_names_tell_apart_are_not_one_run(tmp_path, names, values):
    """R1: seeds were tracked as steps. What the files state does not make them steps of one run, either."""
    for position, name in enumerate(names):
        save(tmp_path / name, **{key: value + position for key, value in values.items()})
    with pytest.raises(CallError, match=r"tell several \w+s apart.*--step") as caught:
        find_checkpoints(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ["model_v1.pt", "model_v2.pt"],
        ["gpt_12l.pt", "gpt_24l.pt"],
        ["pythia_70m.pt", "pythia_160m.pt"],
        ["2024-01-15.pt", "2024-02-15.pt"],
        ["1.pt", "2.pt"],
        ["model_1.pt", "model_2.pt"],
        ["data_00001.pt", "data_00002.pt"],
        ["model_00001_3.pt", "model_00002_4.pt"],
        ["ckpt_3_400.pt", "ckpt_4_500.pt"],
        ["step_10_000.pt", "step_20_000.pt"],
        ["ckpt-3B-tokens.pt", "ckpt-6B-tokens.pt"],
    ],
)
def test_other_numbers_are_not_steps(tmp_path, names):
    for name in names:
        save(tmp_path / name)
    with pytest.raises(CallError, match=r"not known which step each is of: .*--step 'NAME_\{step\}.pt'"):
        find_checkpoints(tmp_path)


def test_numbers_with_units_exponents_and_separators_are_in_order(tmp_path):
    for name in ("step_9500.pt", "step_10k.pt", "step_1e5.pt", "step_20,000.pt", "step_1M.pt", "step_000500.pt"):
        save(tmp_path / name)
    assert steps(tmp_path) == [500, 9500, 10_000, 20_000, 100_000, 1_000_000]


@pytest.mark.parametrize("name", ["gpt2.pt", "model_v2.pt", "model_seed1.pt", "2024.pt", "run_000100.pt"])
def test_the_step_of_a_lone_file_is_unknown_if_nothing_states_it(tmp_path, name):
    save(tmp_path / name)
    assert steps(tmp_path / name) == [None]
    assert steps(tmp_path) == [None]


@pytest.mark.parametrize(
    ("values", "step", "unit", "origin"),
    [
        ({"iter_num": 500, "best_val_loss": torch.tensor(1.5)}, 500, "step", "iter_num in the file"),
        ({"epoch": 4999}, 4999, "epoch", "epoch in the file"),
        ({"epoch": 3, "global_step": 700}, 700, "step", "global_step in the file"),
        ({"step": torch.tensor(12)}, 12, "step", "step in the file"),
        ({"iteration": 40.0}, 40, "step", "iteration in the file"),
        ({"train_state": {"step": 9}}, 9, "step", "train_state.step in the file"),
        ({"args": {"epoch": 100, "step": 7}}, None, "step", None),
        ({"step": -1}, None, "step", None),
        ({"step": True}, None, "step", None),
        ({"step": float("nan")}, None, "step", None),
        ({"iter_num": 0.5}, None, "step", None),
    ],
)
def test_a_file_states_its_step(tmp_path, values, step, unit, origin):
    """R2: the step beside the weights was 0."""
    save(tmp_path / "ckpt.pt", **values)
    (checkpoint,) = find_checkpoints(tmp_path / "ckpt.pt")
    assert (checkpoint.step, checkpoint.unit, checkpoint.step_origin) == (step, unit, origin)


def test_safetensors_state_their_step_in_the_metadata(tmp_path):
    save_file(matrices(), tmp_path / "a.safetensors", metadata={"step": "300"})
    save_file(matrices(), tmp_path / "b.safetensors", metadata={"global_step": "200", "step": "2"})
    assert steps(tmp_path) == [200, 300]
    assert find_checkpoints(tmp_path)[0].step_origin == "global_step in the file's metadata"


def test_files_tell_the_steps_that_names_do_not(tmp_path):
    for name, step in (("best.pt", 400), ("last.pt", 500), ("first.pt", 1)):
        save(tmp_path / name, iter_num=step)
    save(tmp_path / "other.pt")
    run = find_run(tmp_path)
    assert [(checkpoint.step, checkpoint.name) for checkpoint in run.checkpoints] == [
        (1, "first.pt"),
        (400, "best.pt"),
        (500, "last.pt"),
    ]
    assert run.left_out == {"other.pt": "has no step in its name or in its file, unlike others"}


def test_epochs_count_only_where_no_step_is_known(tmp_path):
    for epoch in (1, 2):
        save(tmp_path / "plain" / f"epoch_{epoch}.pt")
        save(tmp_path / "stated" / f"epoch_{epoch}.pt", epoch=epoch, global_step=100 * epoch)
    assert [(each.step, each.unit) for each in find_checkpoints(tmp_path / "plain")] == [(1, "epoch"), (2, "epoch")]
    assert [(each.step, each.unit) for each in find_checkpoints(tmp_path / "stated")] == [(100, "step"), (200, "step")]


def test_files_count_more_than_numbers_that_may_only_count_files(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path / f"ckpt_{number}.pt", iter_num=500 * number)
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [500, 1000, 1500]
    assert run.notes[0] == "ckpt_1.pt: its name says step 1, but iter_num in the file is 500; 500 counts"
    save(tmp_path / "ckpt_4.pt")
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_name_and_a_file_that_disagree(tmp_path):
    save(tmp_path / "model_step_20.pt", iter_num=25)
    run = find_run(tmp_path / "model_step_20.pt")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [20]
    assert run.notes == ["model_step_20.pt: its name says step 20, but iter_num in the file is 25; 20 counts"]
    save(tmp_path / "trainer" / "checkpoint-500" / "model.pt")
    (tmp_path / "trainer" / "checkpoint-500" / "trainer_state.json").write_text('{"global_step": 700}')
    run = find_run(tmp_path / "trainer" / "checkpoint-500")
    assert run.checkpoints[0].step == 700
    assert "checkpoint-500: its name says step 500, but global_step in trainer_state.json is 700" in run.notes[0]


def test_seeds_that_trained_as_long_are_not_one_run(tmp_path):
    for name in ("a.pt", "b.pt", "c.pt"):
        save(tmp_path / name, iter_num=5000)
    with pytest.raises(CallError, match=r"a.pt and b.pt in .* are both of step 5000; .*--step"):
        find_checkpoints(tmp_path)


def test_the_last_model_again_under_another_name_is_left_out(tmp_path):
    for step in (10, 20):
        save(tmp_path / f"step_{step}.pt", global_step=step)
    save(tmp_path / "last.pt", global_step=20)
    save(tmp_path / "later.pt", global_step=30)
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [10, 20, 30]
    assert run.left_out == {"last.pt": "is of step 20, as step_20.pt is"}


def adam(rank: int = 0) -> dict:
    """What an optimizer of torch saves."""
    weight = torch.nn.Parameter(torch.full((4, 4), float(rank)))
    optimizer = torch.optim.Adam([weight])
    weight.square().sum().backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("name", ["optim_{}_rank0.pt", "adam_{}.pt", "zz_{}.pth"])
def test_the_state_of_an_optimizer_is_left_out_under_whatever_name(tmp_path, name):
    """R3: it made the run unreadable."""
    for step in ("000010", "000020"):
        save(tmp_path / f"model_{step}.pt")
        torch.save(adam(), tmp_path / name.format(step))
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [10, 20]
    assert run.left_out == dict.fromkeys(
        (name.format("000010"), name.format("000020")), "holds the state of an optimizer"
    )


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.bin", b"\x7fELF another program", "is not a file of PyTorch: another program wrote it"),
        ("history.pt", {"loss": [2.0, 1.0]}, "holds no tensors"),
        ("results.pt", {"step": 7, "accuracy": 0.5}, "holds no matrices"),
        ("metrics.pth", {"loss": torch.ones(5)}, "holds no matrices"),
    ],
)
def test_what_is_not_a_model_is_named_and_left_out(tmp_path, name, content, why):
    """R3: a folder with ckpt.pt and a binary of another program was refused."""
    save(tmp_path / "ckpt.pt", iter_num=7)
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    run = find_run(tmp_path)
    assert [(checkpoint.step, checkpoint.name) for checkpoint in run.checkpoints] == [(7, "ckpt.pt")]
    assert run.left_out == {name: why}
    assert [weights.layer for weights in open_checkpoint(tmp_path).layers()] == [0]


def test_a_folder_of_nanochat_is_read_with_what_it_saves_beside_each_model(tmp_path):
    for step in (10, 20):
        save(tmp_path / f"model_{step:06d}.pt")
        torch.save(adam(), tmp_path / f"optim_{step:06d}_rank0.pt")
        about = {"step": step, "val_bpb": 1 / step, "model_config": {"n_layer": 1, "n_head": 2, "sequence_len": 8}}
        (tmp_path / f"meta_{step:06d}.json").write_text(json.dumps(about))
    checkpoints = find_checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [10, 20]
    file = open_checkpoint(checkpoints[1].files).file
    assert file.config == {"n_layer": 1, "n_head": 2, "sequence_len": 8}
    assert file.config_origin == "model_config in meta_000020.json"
    assert file.scalars["val_bpb"] == 1 / 20


def test_two_models_in_one_folder_stay_two(tmp_path):
    save(tmp_path / "a.pt")
    save(tmp_path / "b.pt")
    with pytest.raises(CallError, match="not known which step each is of"):
        find_checkpoints(tmp_path)


def test_loss_and_learning_rate_of_a_trainer_are_scalars(tmp_path):
    """R2: they were read and dropped."""
    save_file(matrices(), tmp_path / "model.safetensors")
    history = [{"step": 10, "loss": 2.5, "learning_rate": 1e-3}, {"step": 20, "loss": 1.5}, {"step": 30, "loss": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": history}))
    assert open_checkpoint(tmp_path).scalars == {"loss": 1.5, "learning_rate": 1e-3}
    assert steps(tmp_path) == [20]


def test_a_mapping_carries_scalars_that_are_tensors(tmp_path):
    """R2: the mapping's scalar was not found."""
    save(tmp_path / "ckpt.pt", iter_num=500, best_val_loss=torch.tensor(1.5), scale=torch.tensor([2.0]))
    roles = "\n".join(f'{role} = "blocks.{{layer}}.attn.W_{role}"' for role in "QKVO")
    mapping = f'layout = "transformer_lens"\nprefix = "model"\n[tensors]\n{roles}\n[scalars]\nloss = "best_val_loss"\n'
    (tmp_path / "map.toml").write_text(mapping)
    opened = open_checkpoint(tmp_path / "ckpt.pt", mapping=read_mapping(tmp_path / "map.toml"))
    assert opened.scalars == {"loss": 1.5}


def test_a_pattern_tells_the_step_in_unusual_names(tmp_path):
    for step in (0, 250, 1000):
        save(tmp_path / f"A_1_1_{step}.pt")
    save(tmp_path / "A_1_2_500.pt")
    save(tmp_path / "untrained.pt")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CallError, match="not known which step each is of"):
        find_checkpoints(tmp_path)
    run = find_run(tmp_path, step="A_1_1_{step}.pt")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [0, 250, 1000]
    assert run.checkpoints[0].step_origin == "the pattern 'A_1_1_{step}.pt'"
    unfit = "does not fit the pattern for the step"
    assert run.left_out == {"A_1_2_500.pt": unfit, "untrained.pt": unfit}
    with pytest.raises(CallError, match=r"A_1_1_0.pt and A_1_1_1000.pt in .* are both of step 1;"):
        find_run(tmp_path, step=["A_1_{step}_*.pt"])


@pytest.mark.parametrize("name", ["A_1_1_init.pt", "A_1_1_initial.pt", "A_1_1_INIT.pt"])
def test_a_file_named_init_can_be_step_0(tmp_path, name):
    save(tmp_path / name)
    save(tmp_path / "A_1_1_10.pt")
    run = find_run(tmp_path, step="A_1_1_{step}.pt")
    assert [(checkpoint.step, checkpoint.name) for checkpoint in run.checkpoints] == [(0, name), (10, "A_1_1_10.pt")]
    assert "in the pattern" in str(run.checkpoints[0].step_origin)


def test_the_step_of_one_name_can_be_told(tmp_path):
    save(tmp_path / "before.pt")
    save(tmp_path / "m10k.pt")
    save(tmp_path / "m20_000.pt")
    assert [each.step for each in find_checkpoints(tmp_path, step=["m{step}.pt", "before.pt=0"])] == [0, 10_000, 20_000]
    (checkpoint,) = find_checkpoints(tmp_path / "before.pt", step="before.pt=1e3")
    assert checkpoint.step == 1000


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("A_1_1.pt", "says no step: expected {step}"),
        ("A_{epoch}_{step}.pt", "contains {epoch}; expected {step}, {layer}, {head} or *"),
        ("before.pt=first", "says no step"),
        ("*_*_*_*_{step}.pt", "has more than 3 times [*] in a name"),
        ("C_{step}.pt", "no name in .* fits the pattern 'C_{step}.pt'"),
        ("A_1_1_{step}", "a pattern covers a whole name with its ending"),
        (".+{step}.pt", "no name in .* fits"),
        ("B_3_{step}.pt", "B_3_5fa.pt has '5fa' where the pattern .* has {step}; expected a whole number"),
    ],
)
def test_a_pattern_that_cannot_be_used(tmp_path, pattern, message):
    save(tmp_path / "A_1_1_10.pt")
    save(tmp_path / "B_3_5fa.pt")
    with pytest.raises(CallError, match=message) as caught:
        find_run(tmp_path, step=pattern)
    assert "\n" not in str(caught.value)


def test_a_pattern_reaches_into_folders(tmp_path):
    for step in (5, 10):
        save(tmp_path / f"r{step}" / f"net_{step}.pt")
        save(tmp_path / f"r{step}" / "ema.pt")
    (tmp_path / "config.json").write_text("{}")
    run = find_run(tmp_path, step="r{step}/net_{step}.pt")
    assert [(checkpoint.step, checkpoint.name) for checkpoint in run.checkpoints] == [
        (5, "net_5.pt"),
        (10, "net_10.pt"),
    ]
    assert run.checkpoints[0].files.config is not None
    folders = tmp_path / "folders"
    for step in (5, 10):
        save(folders / f"{step}" / "model.pt")
    assert steps_told(folders, "{step}") == [5, 10]


def steps_told(run, step) -> list[int | None]:
    return [checkpoint.step for checkpoint in find_checkpoints(run, step=step)]


@pytest.mark.parametrize("named", ["distinct", "alike"])
def test_one_step_may_be_spread_over_several_files(tmp_path, named):
    """Each file holds the matrices of one layer; the run has the layers of all files of a step."""
    for step in (1, 2, 3):
        for layer in (0, 1, 2):
            held = {
                (name.replace("blocks.0", f"blocks.{layer}") if named == "distinct" else name.split(".")[-1]): tensor
                for name, tensor in matrices(10 * step + layer).items()
            }
            if (step, layer) != (2, 1):
                torch.save(held, tmp_path / f"s{step}_l{layer}.pt")
    run = find_run(tmp_path, step="s{step}_l{layer}.pt")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1, 3]
    assert run.left_out == dict.fromkeys(("s2_l0.pt", "s2_l2.pt"), "is of step 2, which has no file for part 1")
    pattern = "blocks.{layer}.attn.W_" if named == "distinct" else "{layer}.W_"
    (tmp_path / "map.toml").write_text(
        'layout = "transformer_lens"\nstep = "s{step}_l{layer}.pt"\n[tensors]\n'
        + "\n".join(f'{role} = "{pattern}{role}"' for role in "QKVO")
    )
    mapping = read_mapping(tmp_path / "map.toml")
    assert mapping.step == ("s{step}_l{layer}.pt",)
    layers = list(open_checkpoint(run.checkpoints[1].files, mapping).layers())
    assert [weights.layer for weights in layers] == [0, 1, 2]
    for layer, weights in enumerate(layers):
        expected = matrices(30 + layer)
        torch.testing.assert_close(weights.W_Q, expected["blocks.0.attn.W_Q"], rtol=0, atol=0)
        torch.testing.assert_close(weights.W_O, expected["blocks.0.attn.W_O"], rtol=0, atol=0)
    before = run.checkpoints[1].fingerprint()
    (tmp_path / "s3_l2.pt").write_bytes((tmp_path / "s1_l2.pt").read_bytes())
    assert find_run(tmp_path, step="s{step}_l{layer}.pt").checkpoints[1].fingerprint() != before


def test_every_head_may_have_a_file(tmp_path):
    for step in (1, 2):
        for layer in (0, 1):
            for head in (0, 1):
                generator = torch.Generator().manual_seed(100 * step + 10 * layer + head)
                held = {role: torch.randn(3, 6, generator=generator) for role in "QK"}
                torch.save(held, tmp_path / f"{step}-{layer}-{head}.pt")
    (tmp_path / "map.toml").write_text(
        'layout = "linear"\nheads = 2\n[tensors]\nQ = "{layer}.{head}.Q"\nK = "{layer}.{head}.K"\n'
    )
    run = find_run(tmp_path, step="{step}-{layer}-{head}.pt")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1, 2]
    for layer, weights in enumerate(
        open_checkpoint(run.checkpoints[1].files, read_mapping(tmp_path / "map.toml")).layers()
    ):
        for head in (0, 1):
            generator = torch.Generator().manual_seed(200 + 10 * layer + head)
            assert weights.W_Q is not None
            torch.testing.assert_close(weights.W_Q[head].mT, torch.randn(3, 6, generator=generator), rtol=0, atol=0)
