"""Whether a series is what it claims: planted faults are named with their steps, and plain runs are not flagged."""

import json
import math
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import audit, track
from qkov.analyses.trajectories.integrity import auditing
from qkov.analyses.trajectories.integrity.auditing import bytes_on_this_machine
from qkov.analyses.trajectories.integrity.result import Integrity, integrity_of, sentences, summary
from qkov.analyses.trajectories.integrity.wording import of_identical_layers, steps_in_words
from qkov.circuits import CallError, QkovError
from qkov.circuits.checkpoints.runs import find_run
from qkov.circuits.weights.content import layer_content
from qkov.circuits.weights.layer_keys import layers_in_words
from safetensors.torch import save_file

from ..circuits.range_server import serving

D_MODEL, D_HEAD, HEADS = 16, 8, 2


def drawn(seed: int, layers: int = 3, scale: float = 1.0) -> list[dict[str, torch.Tensor]]:
    """The weights of a model by layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"Q": (HEADS, D_MODEL, D_HEAD), "K": (HEADS, D_MODEL, D_HEAD), "V": (HEADS, D_MODEL, D_HEAD)}
    return [
        {
            name: scale * torch.randn(*shape, generator=generator)
            for name, shape in {**shapes, "O": (HEADS, D_HEAD, D_MODEL)}.items()
        }
        for _ in range(layers)
    ]


def plus(one, other):
    return [{name: layer[name] + change[name] for name in layer} for layer, change in zip(one, other, strict=True)]


def walk(count: int, scale: float = 0.1, layers: int = 3):
    """A random walk of the weights."""
    models = [drawn(0, layers)]
    for step in range(1, count):
        models.append(plus(models[-1], drawn(step, layers, scale)))
    return models


def straight(count: int, layers: int = 3):
    """A path on a straight line, whose steps grow."""
    direction = drawn(99, layers)
    return [
        [
            {name: layer[name] + 0.02 * step**2 * moved[name] for name in layer}
            for layer, moved in zip(drawn(0, layers), direction, strict=True)
        ]
        for step in range(count)
    ]


def write(folder: Path, models: Sequence, steps: Sequence[int] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for step, model in zip(steps or range(0, 10 * len(models), 10), models, strict=True):
        tensors = {
            f"blocks.{i}.attn.W_{name}": tensor for i, layer in enumerate(model) for name, tensor in layer.items()
        }
        save_file(tensors, folder / f"model_step_{step}.safetensors")
    return folder


def both_ways(folder: Path, models: Sequence):
    """The result of an audit of the checkpoints, and that of the store of the tracked run, which has to be the same."""
    run = write(folder / "run", models)
    audited = audit(run)
    track(run, folder / "store")
    assert audit(folder / "store").as_dict() == audited.as_dict()
    return audited


def kinds(audited) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.kind, finding.steps) for finding in audited.findings]


def test_a_first_checkpoint_that_is_the_last_is_named_with_both_steps(tmp_path):
    # R14: four checkpoints, step 0 equal to step 30.
    models = walk(4)
    audited = both_ways(tmp_path, [*models[:3], models[0]])
    assert kinds(audited) == [("identical_checkpoints", (0, 30))]
    assert audited.findings[0].sentence == "Steps 0 and 30 hold identical attention weights, to the bit."
    assert audited.findings[0].layers == (("", 0), ("", 1), ("", 2))
    assert not audited.is_sound
    assert summary(audited) == "Checked 4 checkpoints, step 0 to 30: 1 finding."


def test_checkpoints_that_are_put_together_from_two_others_are_named(tmp_path):
    # R14: a, mix, mix, b, where the mix has layer 0 of b.
    a, *_, b = walk(12, scale=0.3)
    mix = [b[0], *a[1:]]
    audited = both_ways(tmp_path, [a, mix, mix, b])
    assert kinds(audited) == [
        ("identical_checkpoints", (10, 20)),
        ("identical_layers", (0, 10, 20)),
        ("identical_layers", (10, 20, 30)),
    ]
    assert audited.findings[1].layers == (("", 1), ("", 2))
    assert audited.findings[2].layers == (("", 0),)
    assert audited.findings[2].sentence == (
        "Layer 0 is identical, to the bit, at steps 10, 20 and 30, while other layers change, but not at step 0: "
        "it was frozen for a time, or these checkpoints hold weights of each other."
    )


def test_a_mix_whose_other_layers_were_trained_is_named(tmp_path):
    a, second, third, b = walk(4)
    audited = audit(write(tmp_path / "run", [a, [b[0], *second[1:]], [b[0], *third[1:]], b]))
    assert kinds(audited) == [("identical_layers", (10, 20, 30))]
    assert audited.frozen == []


def test_layers_that_come_back_are_named(tmp_path):
    models = walk(6)
    models[1] = [models[1][0], *models[4][1:]]
    audited = audit(write(tmp_path / "run", models))
    assert ("identical_layers", (10, 40)) in kinds(audited)
    found = next(finding for finding in audited.findings if finding.kind == "identical_layers")
    assert found.layers == (("", 1), ("", 2))
    assert found.sentence == (
        "Layers 1 and 2 are identical, to the bit, at steps 10 and 40, but not at steps 20 and 30 in between."
    )


def test_frozen_layers_are_stated_and_are_not_findings(tmp_path):
    models = walk(4)
    models = [[models[0][0], models[0][1], model[2]] for model in models]
    audited = both_ways(tmp_path, models)
    assert audited.findings == []
    assert audited.is_sound
    assert audited.frozen == [("", 0), ("", 1)]
    assert sentences(audited) == [
        "Layers 0 and 1 are frozen: their attention weights are identical in all 4 checkpoints, while other layers "
        "change."
    ]
    assert "no layer but frozen ones is identical in several" in summary(audited)


def test_a_run_whose_attention_never_changes_is_not_called_frozen_layers(tmp_path):
    audited = audit(write(tmp_path / "run", [drawn(0)] * 3))
    assert audited.frozen == []
    assert [finding.sentence for finding in audited.findings] == [
        "All 3 checkpoints, steps 0, 10 and 20, hold identical attention weights, to the bit: one was copied, or "
        "attention was not trained."
    ]


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(lambda: walk(12), id="random walk"),
        pytest.param(lambda: walk(12, scale=3.0), id="wide random walk"),
        pytest.param(lambda: straight(12), id="straight path"),
        pytest.param(lambda: [plus(drawn(0), drawn(seed, scale=0.1)) for seed in range(1, 13)], id="around a point"),
        pytest.param(lambda: walk(1), id="one checkpoint"),
        pytest.param(lambda: walk(2), id="two checkpoints"),
    ],
)
def test_plain_series_are_not_flagged(tmp_path, models):
    audited = audit(write(tmp_path / "run", models()))
    assert audited.is_sound
    assert sentences(audited) == []


def test_random_walks_of_any_width_are_not_flagged(tmp_path):
    for seed in range(8):
        generator = np.random.default_rng(seed)
        steps = np.cumsum(generator.integers(1, 1000, 15)).tolist()
        models = walk(15, scale=float(generator.uniform(0.01, 1)), layers=2)
        assert audit(write(tmp_path / str(seed), models, steps=steps)).is_sound


def test_training_is_not_flagged(tmp_path):
    # Plain gradient descent on a regression with one attention layer, saved on a logarithmic and a dense grid.
    torch.manual_seed(0)
    layer = {name: torch.nn.Parameter(0.3 * tensor) for name, tensor in drawn(0, layers=1)[0].items()}
    tokens, target = torch.randn(64, 5, D_MODEL), torch.randn(64, D_MODEL)
    optimizer = torch.optim.Adam(layer.values(), lr=3e-3)
    saved = {0, 1, 2, 4, 8, 16, 32, 64, *range(100, 400, 20)}
    models, steps = [], []
    for step in range(400):
        if step in saved:
            models.append([{name: tensor.detach().clone() for name, tensor in layer.items()}])
            steps.append(step)
        queries = torch.einsum("bd,hdk->bhk", tokens[:, -1], layer["Q"])
        keys, values = (torch.einsum("btd,hdk->bthk", tokens, layer[name]) for name in "KV")
        pattern = torch.einsum("bhk,bthk->bht", queries, keys).softmax(-1)
        written = torch.einsum("bht,bthk,hkd->bd", pattern, values, layer["O"])
        optimizer.zero_grad()
        (written - target).square().mean().backward()
        optimizer.step()
    audited = audit(write(tmp_path / "run", models, steps=steps))
    assert audited.findings == []


@pytest.mark.parametrize("position", [1, 5, 10])
@pytest.mark.parametrize("path", [walk, straight])
def test_a_foreign_checkpoint_is_found(tmp_path, path, position):
    models = path(12)
    models[position] = drawn(1000)
    audited = audit(write(tmp_path / "run", models))
    assert kinds(audited) == [("distant_checkpoints", (10 * position,))]
    (found,) = audited.findings
    assert found.neighbours == (10 * position - 10, 10 * position + 10)
    # The distances are estimated from sketches; 4.5 % is one standard deviation.
    before, after = models[position - 1], models[position + 1]
    pairs = ((before, models[position]), (models[position], after), (before, after))
    for estimated, pair in zip(found.distances, pairs, strict=True):
        exact = [distance(*pair, each) / norm(before, each) for each in range(3)]
        assert 0.75 * min(exact) < estimated < 1.25 * max(exact)
    assert found.sentence.startswith(
        f"Step {10 * position} is farther from its neighbours, steps {10 * position - 10} and {10 * position + 10}, "
        "than they are from each other in 3 layers (layers 0 to 2): about "
    )


def distance(one, other, layer: int) -> float:
    return math.sqrt(sum((one[layer][name] - other[layer][name]).double().square().sum() for name in "QKVO"))


def norm(model, layer: int) -> float:
    return math.sqrt(sum(model[layer][name].double().square().sum() for name in "QKVO"))


def test_one_foreign_layer_is_found_and_named(tmp_path):
    models = walk(8)
    models[3] = [models[3][0], drawn(1000)[1], models[3][2]]
    audited = both_ways(tmp_path, models)
    assert kinds(audited) == [("distant_checkpoints", (30,))]
    assert audited.findings[0].layers == (("", 1),)
    assert "than they are from each other in layer 1: about " in audited.findings[0].sentence


def test_foreign_checkpoints_in_a_row_are_found_together(tmp_path):
    models, foreign = walk(9), drawn(1000)
    for offset in range(3):
        models[3 + offset] = plus(foreign, drawn(2000 + offset, scale=0.1))
    audited = audit(write(tmp_path / "run", models))
    assert kinds(audited) == [("distant_checkpoints", (30, 40, 50))]
    assert audited.findings[0].neighbours == (20, 60)
    assert "the run jumps by about" in audited.findings[0].sentence


def settling(count: int):
    """A path that settles: each step is 0.6 times as long as the one before."""
    return [
        plus(drawn(0), [{name: (1 - 0.6**step) * moved[name] for name in moved} for moved in drawn(99)])
        for step in range(count)
    ]


@pytest.mark.parametrize(
    ("original", "copy", "distant"),
    [
        # The copy in the place of step 0 or 30 makes the steps beside it, which are where they belong, seem distant.
        (5, 0, []),
        (7, 3, []),
        (10, 0, []),
        # Step 70 holds the weights of step 10: the copy itself does not belong where it stands.
        (1, 7, [("distant_checkpoints", (70,))]),
    ],
)
def test_of_a_copy_only_the_copy_is_said_to_be_distant(tmp_path, original, copy, distant):
    models = settling(11)
    models[copy] = models[original]
    audited = audit(write(tmp_path / "run", models))
    assert kinds(audited) == [("identical_checkpoints", tuple(sorted((10 * original, 10 * copy)))), *distant]


def test_a_foreign_checkpoint_is_found_beside_copies(tmp_path):
    models = walk(14)
    models[3], models[8] = models[4], drawn(1000)
    audited = audit(write(tmp_path / "run", models))
    assert kinds(audited) == [("identical_checkpoints", (30, 40)), ("distant_checkpoints", (80,))]


def test_a_copy_of_a_later_checkpoint_is_found_by_its_bits_and_by_its_distance(tmp_path):
    models = walk(30, scale=0.2)
    models[4] = models[25]
    assert kinds(audit(write(tmp_path / "run", models))) == [
        ("identical_checkpoints", (40, 250)),
        ("distant_checkpoints", (40,)),
    ]


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    models = walk(4)
    models[2] = drawn(5, layers=2)
    audited = audit(write(tmp_path / "run", models))
    assert kinds(audited) == [("other_layers", (20,))]
    assert audited.findings[0].sentence == (
        "Step 20 is of another shape than the run: it has layers 0 and 1; step 30 has layers 0 to 2."
    )
    assert audited.findings[0].layers == (("", 2),)
    wide = [{name: torch.cat([tensor, tensor]) for name, tensor in layer.items()} for layer in models[3]]
    models[2] = wide
    audited = audit(write(tmp_path / "wide", models))
    assert audited.findings[0].sentence == (
        "Step 20 is of another shape than the run: it has W_Q 4 x 16 x 8, W_K 4 x 16 x 8, W_V 4 x 16 x 8, "
        "W_O 4 x 8 x 16 in layer 0; step 30 has W_Q 2 x 16 x 8, W_K 2 x 16 x 8, W_V 2 x 16 x 8, W_O 2 x 8 x 16."
    )
    assert audited.findings[0].layers == (("", 0), ("", 1), ("", 2))


def test_the_format_of_the_files_makes_no_difference(tmp_path):
    models = walk(4)
    run = write(tmp_path / "run", models[:3])
    tensors = {
        f"module.blocks.{i}.attn.W_{name}": tensor.double()
        for i, layer in enumerate(models[0])
        for name, tensor in layer.items()
    }
    torch.save({"state_dict": tensors}, run / "model_step_30.pt")
    assert kinds(audit(run)) == [("identical_checkpoints", (0, 30))]


def test_an_unreadable_checkpoint_is_named_and_the_rest_is_checked(tmp_path):
    models = walk(5)
    run = write(tmp_path / "run", [*models[:4], models[0]])
    damaged = run / "model_step_20.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:300])
    audited = audit(run)
    assert kinds(audited) == [("identical_checkpoints", (0, 40))]
    assert list(audited.unknown) == [20]
    assert audited.checked == [0, 10, 30, 40]
    assert any(line.startswith("Step 20 was not checked: ") and "model_step_20" in line for line in sentences(audited))
    assert not audit(write(tmp_path / "other", walk(1))).unknown


def test_a_run_of_which_nothing_can_be_read_fails(tmp_path):
    run = write(tmp_path / "run", walk(2))
    for file in run.iterdir():
        file.write_bytes(b"12345678")
    with pytest.raises(QkovError, match="model_step_"):
        audit(run)


def test_nan_is_content_without_a_distance(tmp_path):
    models = walk(5)
    for position in (1, 3):
        models[position][1]["Q"][0, 0, 0] = torch.nan
    models[3] = models[1]
    audited = both_ways(tmp_path, models)
    assert ("identical_checkpoints", (10, 30)) in kinds(audited)
    assert audited.untested == [
        "Steps 10 and 30 have NaN or infinite weights in layer 1, which have no distance from others."
    ]


def test_what_a_store_does_not_hold_is_unknown(tmp_path):
    run = write(tmp_path / "run", walk(4))
    store = track(run, tmp_path / "store").store
    store.contents_path(10).unlink()
    audited = audit(tmp_path / "store")
    assert audited.checked == [0, 20, 30]
    assert not audited.is_sound
    assert sentences(audited) == [
        "Step 10 was not checked: the store does not hold the content of its weights, which earlier versions did not "
        "note."
    ]
    store.path(20).unlink()
    assert "Step 20 was not checked: the store does not hold it." in sentences(audit(tmp_path / "store"))
    shutil.rmtree(store.contents_folder)
    with pytest.raises(CallError, match=f"audit the checkpoints themselves: qkov audit {run}"):
        audit(tmp_path / "store")


def test_options_for_reading_do_not_go_with_a_store(tmp_path):
    track(write(tmp_path / "run", walk(2)), tmp_path / "store")
    with pytest.raises(CallError, match="is a run store, of which no checkpoint is read"):
        audit(tmp_path / "store", heads=2)


def test_every_checkpoint_is_reported_as_it_is_read(tmp_path):
    calls = []
    audit(write(tmp_path / "run", walk(3)), progress=lambda *call: calls.append(call))
    assert calls == [(1, 3, 0), (2, 3, 10), (3, 3, 20)]


def test_the_result_is_json(tmp_path):
    models = walk(4)
    result = json.loads(json.dumps(audit(write(tmp_path / "run", [*models[:3], models[0]])).as_dict()))
    assert result["findings"] == [
        {
            "kind": "identical_checkpoints",
            "steps": [0, 30],
            "layers": [["", 0], ["", 1], ["", 2]],
            "sentence": "Steps 0 and 30 hold identical attention weights, to the bit.",
            "neighbours": [],
            "distances": [],
        }
    ]
    assert result["checked"] == [0, 10, 20, 30]


def test_at_a_distance_only_the_attention_tensors_are_sent_and_each_once(tmp_path):
    models = walk(4)
    run = tmp_path / "served" / "run"
    run.mkdir(parents=True)
    for step, model in zip((0, 10, 20, 30), [*models[:3], models[0]], strict=True):
        attention = {f"blocks.{i}.attn.W_{name}": each for i, layer in enumerate(model) for name, each in layer.items()}
        save_file(attention | {"embed.W_E": torch.zeros(1000, 500)}, run / f"model_step_{step}.safetensors")
    with serving(tmp_path / "served") as (address, traffic):
        audited = audit(f"{address}/run")
    assert kinds(audited) == [("identical_checkpoints", (0, 30))]
    of_attention = 4 * 3 * 4 * HEADS * D_MODEL * D_HEAD * 4
    assert of_attention < traffic.sent.total() < of_attention + 4 * 200_000


def test_no_more_than_one_layer_is_in_memory(tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []

    def watched(weights):
        alive.add(weights)
        most.append(len(alive))
        return layer_content(weights)

    monkeypatch.setattr(auditing, "layer_content", watched)
    audit(write(tmp_path / "run", walk(3, layers=5)))
    assert len(most) == 15
    # The layer that was read last is still in the reader's hands as the next one comes.
    assert max(most) <= 2


def test_a_real_run_is_sound(shared_data):
    from qkov.circuits import read_mapping

    mapping = read_mapping(Path(__file__).parents[1] / "data" / "rope_toy.toml")
    audited = audit(shared_data / "checkpoints" / "rope_toy", mapping=mapping)
    assert audited.is_sound
    assert len(audited.checked) == 41


def test_words():
    assert layers_in_words([("", 3)]) == "layer 3"
    assert layers_in_words([("", 0), ("", 1), ("", 2), ("", 7)]) == "layers 0 to 2 and 7"
    assert layers_in_words([("encoder", 0), ("encoder", 2), ("decoder", 1)]) == (
        "encoder layers 0 and 2 and decoder layer 1"
    )
    assert steps_in_words([5]) == "step 5"
    assert steps_in_words(range(20)) == "steps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more"


def test_epochs_are_called_epochs(tmp_path):
    models = walk(5)
    models[2] = drawn(1000)
    models[4] = models[0]
    for epoch, model in enumerate(models):
        tensors = {f"blocks.{i}.attn.W_{name}": each for i, layer in enumerate(model) for name, each in layer.items()}
        torch.save({"model": tensors, "epoch": epoch}, tmp_path / f"model_{'abcde'[epoch]}.pt")
    audited = audit(tmp_path)
    assert audited.unit == "epoch"
    assert [finding.sentence.split(" hold")[0].split(" is")[0] for finding in audited.findings] == [
        "Epochs 0 and 4",
        "Epoch 2",
    ]
    assert "neighbours, epochs 1 and 3, than" in audited.findings[1].sentence


def test_a_single_checkpoint_of_unknown_step_has_nothing_to_be_compared_with(tmp_path):
    write(tmp_path / "run", walk(1))
    lone = tmp_path / "run" / "model_step_0.safetensors"
    lone.rename(tmp_path / "model.safetensors")
    audited = audit(tmp_path / "model.safetensors")
    assert audited.checked == [None]
    assert audited.is_sound
    assert summary(audited) == "Only step unknown was read: there is nothing to compare it with."


def contents_of(*layers: Sequence[Sequence[float]], digests: str = "") -> pd.DataFrame:
    """The contents of a run, step by step, of the sketches of each layer; equal letters are digests of layer 0."""
    return pd.DataFrame(
        [
            {
                "source": f"step {10 * position}",
                "step": 10 * position,
                "stack": "",
                "layer": layer,
                "shapes": "W_QK 1 x 2 x 2",
                "digest": digests[position] if digests and layer == 0 else f"{layer} {position}",
                "sketch": sketch,
            }
            for layer, sketches in enumerate(layers)
            for position, sketch in enumerate(sketches)
        ]
    )


def path_with_a_peak(height: float) -> list[tuple[float, float]]:
    """From (1, 0) to (2, 0) by a point in the middle, which is at this distance from both."""
    return [(1.0, 0.0), (1.5, math.sqrt(height**2 - 0.25)), (2.0, 0.0)]


def test_a_checkpoint_is_distant_above_one_and_a_half_times_the_distance_of_its_neighbours():
    assert integrity_of(contents_of(path_with_a_peak(1.49))).is_sound
    (found,) = integrity_of(contents_of(path_with_a_peak(1.51))).findings
    assert (found.kind, found.steps, found.neighbours) == ("distant_checkpoints", (10,), (0, 20))
    # Relative to the norm of the weights before, which is 1.
    assert found.distances == pytest.approx((1.51, 1.51, 1.0), rel=1e-12)


def test_the_distances_are_of_the_layer_in_which_they_are_most_pronounced():
    wide = [(10.0, 0.0), (11.0, math.sqrt(35.0)), (12.0, 0.0)]
    assert np.hypot(*np.subtract(wide[1], wide[0])) == pytest.approx(6)
    # Ratios of 3 and of 4, where the layer with the larger ratio has the smaller distances.
    for layers in ((wide, path_with_a_peak(4.0)), (path_with_a_peak(4.0), wide)):
        (found,) = integrity_of(contents_of(*layers)).findings
        assert found.layers == (("", 0), ("", 1))
        assert found.distances == pytest.approx((4.0, 4.0, 1.0), rel=1e-12)


def test_a_pair_around_another_pair_is_not_reported_twice():
    """Layer 0 is identical at steps 0 and 20, and near both at step 40: only the pair of 20 and 40 is left."""
    path = [(1.0, 0.0), (1.0, 90.0), (1.0, 0.0), (1.0, -90.0), (1.1, 0.0)]
    audited = integrity_of(contents_of(path, [(1.0, step) for step in range(5)], digests="abacd"))
    assert [finding.neighbours for finding in audited.findings if finding.kind == "distant_checkpoints"] == [(20, 40)]


def test_checkpoints_that_differ_in_biases_alone_are_not_distant():
    """Sketches leave biases out, digests do not."""
    assert integrity_of(contents_of([(1.0, 2.0)] * 3)).is_sound


def test_weights_that_start_at_zero_have_no_relative_distance():
    (found,) = integrity_of(contents_of([(0.0, 0.0), (0.0, 5.0), (1.0, 0.0)])).findings
    assert found.steps == (10,)
    assert all(math.isnan(distance) for distance in found.distances)


def test_two_checkpoints_are_compared(tmp_path):
    models = walk(2)
    audited = audit(write(tmp_path / "same", [models[0]] * 2))
    assert [finding.sentence for finding in audited.findings] == [
        "Both checkpoints, steps 0 and 10, hold identical attention weights, to the bit: one was copied, or attention "
        "was not trained."
    ]
    audited = audit(write(tmp_path / "frozen", [models[0], [*models[1][:2], models[0][2]]]))
    assert sentences(audited) == [
        "Layer 2 is frozen: its attention weights are identical in both checkpoints, while other layers change."
    ]
    audited = audit(write(tmp_path / "other", models))
    assert summary(audited) == (
        "Checked 2 checkpoints, step 0 to 10: no two are identical, no layer is identical in several."
    )


def test_one_of_two_checkpoints_may_be_unreadable(tmp_path):
    for damaged in (0, 10):
        run = write(tmp_path / str(damaged), walk(2))
        (run / f"model_step_{damaged}.safetensors").write_bytes(b"12345678")
        calls = []
        audited = audit(run, progress=lambda *call, calls=calls: calls.append(call))
        assert calls == [(1, 2, 0), (2, 2, 10)]
        assert list(audited.unknown) == [damaged]
        assert audited.checked == [10 - damaged]
        assert not audited.is_sound


def test_a_wrong_call_is_refused_at_the_first_checkpoint(tmp_path):
    calls = []
    with pytest.raises(CallError, match=r"model_step_0.safetensors: there is no family 'nothing'"):
        audit(write(tmp_path / "run", walk(3)), family="nothing", progress=lambda *call: calls.append(call))
    assert calls == []


def test_the_bytes_on_this_machine_are_those_of_the_files_of_weights(tmp_path):
    run = write(tmp_path / "served" / "run", walk(3))
    expected = sum(file.stat().st_size for file in run.iterdir())
    assert expected > 3 * 3 * 4 * HEADS * D_MODEL * D_HEAD * 4
    assert bytes_on_this_machine(find_run(run).checkpoints) == expected
    with serving(tmp_path / "served") as (address, _):
        assert bytes_on_this_machine(find_run(f"{address}/run").checkpoints) is None


def test_of_thirteen_steps_all_are_named_and_of_fourteen_twelve():
    assert steps_in_words(range(13)) == "steps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 12"
    assert steps_in_words(range(14)) == "steps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more"


def test_layers_that_stood_still_for_a_time_are_named_with_the_steps_around_it():
    run = [0, 10, 20, 30, 40, 50, 60]
    assert of_identical_layers((20, 30), [("", 0), ("", 1)], run, "step") == (
        "Layers 0 and 1 are identical, to the bit, at steps 20 and 30, while other layers change, but not at steps 10 "
        "and 40: they were frozen for a time, or these checkpoints hold weights of each other."
    )
    assert of_identical_layers((0, 10), [("", 4)], run, "step") == (
        "Layer 4 is identical, to the bit, at steps 0 and 10, while other layers change, but not at step 20: it was "
        "frozen for a time, or these checkpoints hold weights of each other."
    )


def test_of_no_checkpoint_nothing_is_said():
    assert summary(Integrity(checked=[])) == "No checkpoint could be checked."
