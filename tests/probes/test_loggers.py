"""What a CircuitProbe passes to loggers: medians and largest values of layers, chosen heads, and any name."""

import math

import numpy as np
import pytest
import torch
from qkov.circuits import CallError
from qkov.probes import CircuitProbe, LogFilter, log_to, log_to_tensorboard, log_to_wandb
from qkov.probes.training.log_filter import RowLog

from .circuit_models import Classifier, language_loss, language_model, loss_of

#: The figures of the default, and whether both circuits have them.
MEDIANS = {
    "frobenius_norm": True,
    "relative_speed": True,
    "effective_ratio": False,
    "taken_rate": True,
    "taken_exact_cosine": True,
}


def trained(model, loss=language_loss, steps=2, **options):
    """The records of a training of two steps, and its probe."""
    records: dict[int, dict[str, float]] = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = CircuitProbe(model, every=1, optimizer=optimizer, log=records.__setitem__, **options)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        measured = loss(model, step)
        measured.backward()
        probe.note(loss=measured, learning_rate=1e-2)
        optimizer.step()
    return records, probe


def expected_by_default(probe, step):
    """The values of a step from the table, by pandas and numpy."""
    table = probe.table().query(f"step == {step}")
    expected = {"training/loss": table["training_loss"].iloc[0], "training/learning_rate": 1e-2}
    for (layer, circuit), rows in table.groupby(["layer", "circuit"]):
        for name, of_both in MEDIANS.items():
            if of_both or circuit == "QK":
                expected[f"{circuit}.{name}/layer{layer}.median"] = np.median(rows[name])
        norms = rows.set_index("head")["spectral_norm"]
        expected[f"{circuit}.spectral_norm/layer{layer}.largest"] = norms.max()
        expected[f"{circuit}.spectral_norm/layer{layer}.largest_head"] = norms.idxmax()
    return expected


def test_by_default_each_layer_has_its_medians_and_its_largest_head():
    records, probe = trained(language_model("gpt2"))
    assert set(records) == {0, 1, 2}
    for step in (1, 2):
        assert records[step] == pytest.approx(expected_by_default(probe, step), rel=1e-15)
    # The start has no step, no speed and no loss.
    assert {name.split("/")[0] for name in records[0]} == {
        f"{circuit}.{name}" for circuit in ("QK", "OV") for name in ("frobenius_norm", "spectral_norm")
    }


def test_the_largest_value_is_that_of_the_one_head_that_grew():
    model = language_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, 4:8] *= 1000  # the queries of head 1 of layer 1
    records, _ = trained(model, steps=1)
    assert records[1]["QK.spectral_norm/layer1.largest_head"] == 1
    assert records[1]["QK.spectral_norm/layer1.largest"] > 100 * records[1]["QK.frobenius_norm/layer1.median"]


def test_gpt2_small_has_fewer_than_200_values_where_every_head_would_have_thousands():
    import transformers

    config = transformers.GPT2Config(
        n_layer=12, n_head=12, n_embd=24, vocab_size=20, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    by_default, every = (
        trained(transformers.GPT2LMHeadModel(config).double(), steps=1, log_filter=chosen)[0]
        for chosen in (LogFilter(heads=[(5, 1)]), lambda _: True)
    )
    assert 150 < len(by_default[1]) < 200
    assert len(every[1]) > 9000
    assert by_default[1].keys() <= every[1].keys()
    # A health probe adds the largest score of each layer and its head.
    assert len(by_default[1]) + 2 * 12 < 200


def test_heads_given_by_name_are_passed_beside_the_layers():
    chosen = LogFilter(medians=["frobenius_norm"], largest=["imbalance"], heads=[(1, 2), (0, 0)])
    records, probe = trained(language_model("gpt2"), log_filter=chosen)
    table = probe.table().query("step == 2").set_index(["layer", "head", "circuit"])
    of_heads = {name: value for name, value in records[2].items() if ".head" in name}
    assert of_heads == {
        f"{circuit}.{figure}/layer{layer}.head{head}": table.loc[(layer, head, circuit), figure]
        for layer, head in ((1, 2), (0, 0))
        for circuit in ("QK", "OV")
        for figure in ("frobenius_norm", "imbalance")
    }
    others = {name.split("/")[0] for name in records[2].keys() - of_heads.keys()}
    assert others == {"training"} | {f"{c}.{f}" for c in ("QK", "OV") for f in ("frobenius_norm", "imbalance")}


def test_a_function_chooses_among_all_names():
    names = []

    def keep(name: str) -> bool:
        names.append(name)
        return name.startswith("OV.copying_score/") and name.endswith(".median")

    records, probe = trained(language_model("gpt2"), log_filter=keep)
    rows = probe.table().query("step == 2 and circuit == 'OV'")
    medians = rows.groupby("layer")["copying_score"].median()
    assert records[2] == pytest.approx({f"OV.copying_score/layer{n}.median": medians[n] for n in (0, 1)}, rel=1e-15)
    assert {"QK.taken_rate/layer1.head2", "QK.omega_self/layer0.largest_head", "training/loss"} <= set(names)
    assert not [
        name for name in names if "singular_values" in name or "rank_bound" in name or "OV.effective_ratio" in name
    ]


def test_stacks_are_part_of_the_names():
    rows = [
        {"stack": stack, "layer": 0, "head": head, "circuit": "QK", "frobenius_norm": value, "training_loss": 2.0}
        for stack, head, value in (("encoder", 0, 1.0), ("encoder", 1, 3.0), ("cross attention", 0, math.inf))
    ]
    records: dict[int, dict[str, float]] = {}
    chosen = LogFilter(medians=["frobenius_norm"], largest=[], heads=[("encoder", 0, 1)])
    RowLog(records.__setitem__, chosen)(7, rows)
    assert records == {
        7: {
            "training/loss": 2.0,
            "QK.frobenius_norm/encoder.layer0.median": 2.0,
            "QK.frobenius_norm/encoder.layer0.head1": 3.0,
        }
    }
    rows[2]["frobenius_norm"] = 4.0
    RowLog(records.__setitem__, chosen)(8, rows)
    assert records[8]["QK.frobenius_norm/cross_attention.layer0.median"] == 4.0


def test_a_head_that_the_model_lacks_is_refused_before_anything_is_written(tmp_path):
    store = tmp_path / "run"
    with pytest.raises(
        CallError,
        match=r"log_filter names the head \(2, 0\), and the model has heads 0 to 2 in layer 0, .* up to layer 1$",
    ):
        CircuitProbe(language_model("gpt2"), store, log=print, log_filter=LogFilter(heads=[(2, 0)]))
    assert not store.exists()


def test_a_name_that_is_not_a_column_is_told_once():
    with pytest.warns(
        UserWarning, match="log_filter names frobenius, of which no circuit has values; there are "
    ) as told:
        trained(Classifier(), loss_of, steps=3, log_filter=LogFilter(medians=["frobenius", "frobenius_norm"]))
    assert len(told) == 1
    assert "stable_rank" in str(told[0].message)
    assert "singular_values" not in str(told[0].message)


def test_tensorboard_shows_what_was_passed(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    records: dict[int, dict[str, float]] = {}
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter(str(tmp_path)) as writer:
        write = log_to_tensorboard(writer)

        def log(step: int, values: dict[str, float]) -> None:
            records[step] = values
            write(step, values)

        probe = CircuitProbe(model, every=2, optimizer=optimizer, log=log)
        for step in range(1, 5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            probe.note(loss=0.5 * step)
            optimizer.step()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    shown: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            shown.setdefault(event.step, {})[name] = event.value
    assert set(shown) == {0, 2, 4}
    assert shown[4]["training/loss"] == 2.0
    for step, values in records.items():
        assert shown[step] == pytest.approx(values, rel=1e-6)  # event files hold single precision


class Run:
    """A run of Weights & Biases as its documentation describes it: rows that grow until they are committed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = [{}]
        self.axes: dict[str, str] = {}

    @property
    def step(self) -> int:
        return len(self.rows) - 1

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None, "the count of rows is the user's"
        self.rows[-1] |= data
        if commit or commit is None:
            self.rows.append({})


def test_wandb_keeps_the_user_s_rows_and_every_step():
    run = Run()
    log = log_to_wandb(run)
    assert run.axes == {"QK.*": "circuits/step", "OV.*": "circuits/step"}
    for step in range(1, 7):
        if step % 2 == 0:
            log(step, {"QK.frobenius_norm/layer0.median": 10.0 * step})
        if step not in (2, 3, 4):
            run.log({"loss": float(step)})
    seen = [(row.get("circuits/step"), row.get("QK.frobenius_norm/layer0.median"), row.get("loss")) for row in run.rows]
    # Step 2 has a row of its own, since the user completed none before step 4 came.
    assert seen == [(None, None, 1.0), (2, 20.0, None), (4, 40.0, 5.0), (6, 60.0, 6.0), (None, None, None)]


def test_wandb_itself_takes_it(tmp_path):
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", project="circuits", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    try:
        log = log_to_wandb(run)
        for step in (0, 1, 2):
            log(step, {"QK.frobenius_norm/layer0.median": 1.5 * step})
            run.log({"loss": 1.0})
        assert run.step == 3  # one row for each call of the user's
        assert run.summary["QK.frobenius_norm/layer0.median"] == 3.0
        assert run.summary["circuits/step"] == 2
    finally:
        run.finish()


def test_loggers_like_trackio_get_the_values_and_the_step():
    class Trackio:
        def __init__(self) -> None:
            self.logged: list[tuple[dict[str, float], int]] = []

        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged.append((metrics, step))

    logger = Trackio()
    log_to(logger)(3, {"training/loss": 0.5})
    assert logger.logged == [({"training/loss": 0.5}, 3)]


@pytest.mark.parametrize("adapter", [log_to, log_to_tensorboard, log_to_wandb])
def test_what_is_not_a_logger_is_refused(adapter):
    with pytest.raises(CallError, match=r"expected .*, which has the attribute \w+, got 3"):
        adapter(3)
