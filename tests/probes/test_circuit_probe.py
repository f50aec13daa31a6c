"""CircuitProbe in training loops: what it logs of each step, against autograd on the dense products."""

import contextlib
import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import TaskDirections
from qkov.circuits import CallError, Circuit, measure, open_model
from qkov.circuits.algebra.factor_steps import LARGEST_DISAGREEMENT, OMEGA_QUANTITIES, STEP_QUANTITIES
from qkov.probes import CircuitProbe, CircuitRates

from .circuit_models import Classifier, cosine, dense_omega, language_loss, language_model, loss_of

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "weight decay": lambda parameters: torch.optim.SGD(parameters, 0.1, weight_decay=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
}


def dense_gradients(model, seed):
    """dL/dW_QK and dL/dW_OV of each head, by autograd on the products as leaves."""
    leaves = {
        name: [(A @ B).requires_grad_() for A, B in zip(*pair, strict=True)] for name, pair in model.factors().items()
    }
    by_products = copy.deepcopy(model)
    by_products.forward = lambda x: by_products.by_products(leaves["QK"], leaves["OV"], x)
    loss_of(by_products, seed).backward()
    return {name: [leaf.grad for leaf in of_name] for name, of_name in leaves.items()}


def expected_figures(before, after, gradients, name, head):
    A, B = (side[head] for side in before[name])
    G = gradients[name][head]
    exact, omega = A @ A.T @ G + G @ B.T @ B, dense_omega(A @ B, G)
    taken = after[name][0][head] @ after[name][1][head] - A @ B
    return {
        "exact_step_norm": float(exact.norm()),
        "omega_step_norm": float(omega.norm()),
        "omega_cosine": cosine(omega, exact),
        "omega_relative_error": float((omega - exact).norm() / exact.norm()),
        "taken_step_norm": float(taken.norm()),
        "taken_exact_cosine": -cosine(taken, exact),
        "taken_omega_cosine": -cosine(taken, omega),
        "taken_rate": -float((taken * exact).sum() / exact.square().sum()),
    }


#: Nesterov's momentum may be added to the gradients themselves, so that only an attached probe sees them as they were.
WAYS = [(name, how) for name in OPTIMIZERS for how in ("step", "attach") if (name, how) != ("nesterov", "step")]


@pytest.mark.parametrize(("optimizer", "how"), WAYS)
def test_every_logged_step_is_that_of_the_dense_products(optimizer, how):
    model = Classifier()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    probe = CircuitProbe(model, every=2)
    attached = probe.attach(stepping) if how == "attach" else None
    expected = {}
    for step in range(1, 5):
        before, gradients = model.factors(), dense_gradients(model, step)
        loss = loss_of(model, step)
        loss.backward()
        if attached is not None:
            probe.note(loss=loss)
        stepping.step()
        if attached is None:
            probe.step(loss)
        stepping.zero_grad()
        expected[step] = (before, model.factors(), gradients, float(loss.detach()))
    rows = probe.table()
    assert sorted(rows["step"].unique()) == [0, 2, 4]
    assert rows[rows["step"] == 0][list(STEP_QUANTITIES)].isna().all(axis=None)
    for row in rows[rows["step"] > 0].to_dict("records"):
        before, after, gradients, loss = expected[row["step"]]
        assert row["training_loss"] == loss
        assert row["gradient_disagreement"] < 1e-12
        for name, value in expected_figures(before, after, gradients, row["circuit"], row["head"]).items():
            assert row[name] == pytest.approx(value, rel=1e-8, abs=1e-10), (name, row["step"], row["circuit"])


def trained(optimizer, steps=1):
    """Rows of the last step."""
    model = Classifier()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    probe = CircuitProbe(model, every=steps)
    for step in range(1, steps + 1):
        stepping.zero_grad()
        loss_of(model, step).backward()
        stepping.step()
        probe.step()
    return probe.table().query(f"step == {steps}")


def test_what_the_optimizer_makes_of_the_gradient_is_seen():
    plain, decayed, adam = (trained(name) for name in ("sgd", "weight decay", "adamw"))
    # Of the second order in the rate alone.
    np.testing.assert_allclose(plain["taken_rate"], 0.1, rtol=0.02)
    assert (plain["taken_exact_cosine"] > 0.9999).all()
    assert (decayed["taken_exact_cosine"] < 0.9).all()
    assert (adam["taken_exact_cosine"] < 0.97).all()


def test_rows_are_what_the_weights_give():
    model = Classifier()
    probe = CircuitProbe(model, every=[3, 5])
    stepping = torch.optim.SGD(model.parameters(), 0.1)
    held = {0: list(open_model(copy.deepcopy(model)).layers())}
    for step in range(1, 7):
        loss_of(model, step).backward()
        stepping.step()
        probe.step()
        stepping.zero_grad()
        held[step] = list(open_model(copy.deepcopy(model)).layers())
    rows = probe.table()
    assert list(rows["step"].unique()) == [0, 3, 5]
    for row in rows.to_dict("records"):
        step, head, name = row["step"], row["head"], row["circuit"]
        circuit, start = (held[at][0].circuits()[name][head].dense() for at in (step, 0))
        for figure, value in measure(held[step][0].circuits()[name], eigenvalues=name == "OV").items():
            np.testing.assert_allclose(row[figure], value[head].numpy(), rtol=1e-9)
        assert row["reference"] == "step 0"
        assert row["reference_cosine"] == pytest.approx(cosine(circuit, start))
        previous = {0: None, 3: 0, 5: 3}[step]
        if previous is None:
            assert np.isnan(row["change_norm"])
            continue
        earlier = held[previous][0].circuits()[name][head].dense()
        assert row["previous_step"] == previous
        assert row["change_norm"] == pytest.approx(float((circuit - earlier).norm()), rel=1e-9)
        speed = float((circuit - earlier).norm() / earlier.norm()) / (step - previous)
        assert row["relative_speed"] == pytest.approx(speed, rel=1e-9)
    last = rows[rows["step"] == 5].pivot(index="head", columns="circuit")
    ratio = last["relative_speed", "QK"] / last["relative_speed", "OV"]
    for name in ("QK", "OV"):
        np.testing.assert_allclose(last["effective_ratio", name], ratio)


def test_by_default_the_start_and_every_hundredth_step_are_logged():
    model = Classifier()
    probe = CircuitProbe(model)
    stepping = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(1, 202):
        stepping.zero_grad()
        loss_of(model, step).backward()
        stepping.step()
        probe.step()
    assert list(probe.table()["step"].unique()) == [0, 100, 200]


def test_a_loss_that_knows_the_factors_is_seen_by_their_gradients():
    model = Classifier()
    probe = CircuitProbe(model, every=1)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (loss_of(model, 0) + penalty).backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    probe.step()
    rows = probe.table().query("step == 1")
    assert (rows["gradient_disagreement"] > LARGEST_DISAGREEMENT).all()
    assert rows[list(OMEGA_QUANTITIES)].isna().all(axis=None)
    assert rows["taken_exact_cosine"].notna().all()


def test_frozen_weights_have_no_test():
    model = Classifier()
    model.attention.out_proj.weight.requires_grad_(False)
    probe = CircuitProbe(model, every=1)
    loss_of(model, 0).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    probe.step()
    rows = probe.table().query("step == 1")
    frozen = rows[rows["circuit"] == "OV"]
    assert frozen[[name for name in STEP_QUANTITIES if name != "taken_step_norm"]].isna().all(axis=None)
    assert (frozen["taken_step_norm"] > 0).all()
    assert rows[rows["circuit"] == "QK"][list(STEP_QUANTITIES)].notna().all(axis=None)


def test_gradients_that_are_gone_are_asked_for_once():
    model = Classifier()
    probe = CircuitProbe(model, every=1)
    with pytest.warns(
        UserWarning, match=r"the gradients of all attention weights are 0 or missing at step 1.*after probe.step\(\)"
    ):
        probe.step()
    probe.step()
    rows = probe.table()
    assert rows[[name for name in STEP_QUANTITIES if name != "taken_step_norm"]].isna().all(axis=None)
    assert (rows[rows["step"] > 0]["taken_step_norm"] == 0).all()


def test_gradients_are_accumulated_and_scaled_by_whoever_does_so():
    figures = []
    for way in ("at once", "in parts", "scaled"):
        model = Classifier()
        stepping = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=way == "scaled")
        probe = CircuitProbe(model, every=1)
        with probe.attach(stepping):
            if way == "in parts":
                for seed in (0, 1):
                    (0.5 * loss_of(model, seed)).backward()
            else:
                scaler.scale((loss_of(model, 0) + loss_of(model, 1)) / 2).backward()
            scaler.step(stepping)
        assert probe.steps == 1
        figures.append(probe.table().query("step == 1")[list(STEP_QUANTITIES)].iloc[:, 1:])
    for other in figures[1:]:
        np.testing.assert_allclose(other, figures[0], rtol=1e-9)


def test_an_optimizer_that_computes_gradients_itself_is_followed():
    rows = []
    for with_closure in (True, False):
        model = Classifier()
        stepping = torch.optim.SGD(model.parameters(), 0.1)

        def closure(model=model):
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        probe = CircuitProbe(model, every=1)
        with probe.attach(stepping):
            if with_closure:
                stepping.step(closure)
            else:
                closure()
                stepping.step()
        rows.append(probe.table()[list(STEP_QUANTITIES)])
    np.testing.assert_array_equal(*rows)


def test_hooks_are_gone_when_detached_and_after_an_error():
    model = Classifier()
    stepping = torch.optim.SGD(model.parameters(), 0.1)
    probe = CircuitProbe(model, every=1)
    attached = probe.attach(stepping)
    probe.step(loss=1.0)
    assert probe.steps == 0
    with pytest.raises(CallError, match="attached to an optimizer already"):
        probe.attach(stepping)
    with pytest.raises(RuntimeError, match="of the user"), attached:
        raise RuntimeError("of the user")
    attached.detach()
    assert not stepping._optimizer_step_pre_hooks
    assert not stepping._optimizer_step_post_hooks
    loss_of(model, 0).backward()
    stepping.step()
    assert probe.steps == 0
    probe.step()
    assert probe.steps == 1


def test_a_step_that_was_never_begun_is_refused_where_it_is_due():
    probe = CircuitProbe(Classifier(), every=2, on_error="raise")
    probe.end_step()
    with pytest.raises(CallError, match="step 2 was ended but never begun"):
        probe.end_step()


def test_steps_that_are_not_logged_cost_nothing_that_is_read(monkeypatch):
    model = Classifier()
    probe = CircuitProbe(model, every=lambda step: step == 10, on_error="raise")

    def read(*_):
        raise AssertionError("read")

    class Unreadable:
        __float__ = read

    unreadable = Unreadable()
    monkeypatch.setattr(type(probe._run.model), "factors", read)
    monkeypatch.setattr(type(probe._run.model), "layers", read)
    for _ in range(8):
        probe.step(unreadable)
    assert probe.steps == 8
    # The step behind the next is to be logged: its weights are needed before it.
    with pytest.raises(AssertionError, match="read"):
        probe.step(unreadable)


def test_a_callable_gets_every_figure_by_name():
    records = {}
    model = Classifier()
    probe = CircuitProbe(model, every=1, log=records.__setitem__, log_filter=lambda _: True)
    loss_of(model, 0).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    probe.step(loss=0.5, rate=0.1)
    assert set(records) == {0, 1}
    rows = probe.table().set_index(["step", "head", "circuit"])
    record = records[1]
    assert record["training/loss"] == 0.5
    assert record["training/rate"] == 0.1
    assert record["QK.frobenius_norm/layer0.head1"] == rows.loc[(1, 1, "QK"), "frobenius_norm"]
    assert record["OV.omega_cosine/layer0.head0"] == rows.loc[(1, 0, "OV"), "omega_cosine"]
    assert all(isinstance(value, float) and math.isfinite(value) for value in record.values())
    assert "QK.copying_score/layer0.head0" not in record
    assert not [name for name in records[0] if "taken" in name or "speed" in name]


@pytest.mark.parametrize("way", ["step", "attach"])
def test_steps_after_a_log_that_failed_are_as_if_it_had_not(way):
    def trained(log) -> pd.DataFrame:
        model = Classifier()
        stepping = torch.optim.SGD(model.parameters(), 0.1)
        probe = CircuitProbe(model, every=[1, 2, 4], log=log, on_error="raise")
        if way == "attach":
            probe.attach(stepping)
        for step in range(5):
            stepping.zero_grad()
            loss_of(model, step).backward()
            with contextlib.suppress(ConnectionError):
                stepping.step()
            if way == "step":
                with contextlib.suppress(ConnectionError):
                    probe.step(loss=float(step))
        assert probe.steps == 5
        return probe.table()

    def fail(step: int, _record: dict[str, float]) -> None:
        if step == 1:
            raise ConnectionError("of the logger")

    failed = trained(fail)
    assert sorted(failed["step"].unique()) == [0, 1, 2, 4]
    pd.testing.assert_frame_equal(failed, trained(None))


def test_directions_take_the_place_of_the_start():
    torch.manual_seed(0)
    model = Classifier()
    matrices = {name: torch.randn(8, 8, dtype=torch.float64) for name in ("QK", "OV")}
    directions = TaskDirections("of a task", {name: Circuit(matrix) for name, matrix in matrices.items()})
    rows = CircuitProbe(model, directions=directions).table()
    (layer,) = open_model(model).layers()
    for row in rows.to_dict("records"):
        circuit = layer.circuits()[row["circuit"]][row["head"]].dense()
        assert row["reference"] == "of a task"
        assert row["reference_cosine"] == pytest.approx(cosine(circuit, matrices[row["circuit"]]))


def test_the_basis_is_that_of_the_figures_of_the_weights_alone():
    raw, folded = (language_model("gpt2") for _ in range(2))
    tables = []
    for model, basis in ((raw, "raw"), (folded, "folded")):
        probe = CircuitProbe(model, every=1, basis=basis)
        language_loss(model, 0).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        probe.step()
        tables.append(probe.table())
    figures = list(STEP_QUANTITIES)
    np.testing.assert_array_equal(*(table[figures] for table in tables))
    assert (tables[0]["frobenius_norm"] != tables[1]["frobenius_norm"]).all()


def test_training_is_the_same_to_the_bit():
    trained = []
    for is_probed in (False, True):
        model = Classifier()
        stepping = torch.optim.AdamW(model.parameters(), 0.01)
        if is_probed:
            CircuitProbe(model, every=1).attach(stepping)
        for step in range(3):
            stepping.zero_grad()
            loss_of(model, step).backward()
            stepping.step()
        trained.append([*model.parameters(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


def test_weights_that_are_put_elsewhere_are_followed():
    tables = []
    for is_moved in (False, True):
        model = Classifier()
        probe = CircuitProbe(model, every=1)
        if is_moved:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        loss_of(model, 0).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        probe.step()
        tables.append(probe.table())
    pd.testing.assert_frame_equal(*tables)
    assert (tables[0][tables[0]["step"] == 1]["taken_step_norm"] > 0).all()


def test_circuit_rates_that_were_attached_before_are_part_of_the_step():
    model = Classifier(bias=False)
    stepping = torch.optim.SGD(model.parameters(), 1e-3)
    CircuitRates(stepping, model, qk=30.0)
    probe = CircuitProbe(model, every=1)
    probe.attach(stepping)
    loss_of(model, 0).backward()
    stepping.step()
    rates = probe.table().query("step == 1").groupby("circuit")["taken_rate"]
    np.testing.assert_allclose(rates.mean()[["OV", "QK"]], [1e-3, 30e-3], rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every should be a whole number of at least 1, some steps, or a function of the step, got 0"),
        (
            {"every": []},
            r"every should be a whole number of at least 1, some steps, or a function of the step, got \[\]",
        ),
        ({"start": -1}, "start should be a number of steps, got -1"),
        ({"basis": "other"}, "basis should be one of raw, folded, folded_centred"),
        ({"rotary_offset": 2}, "the model Classifier has no layer with rotary positions"),
        ({"basis": "folded"}, "the norm in front of layer 0 is not known"),
    ],
)
def test_wrong_calls_leave_no_store(tmp_path, options, message):
    with pytest.raises(CallError, match=message):
        CircuitProbe(Classifier(), tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


def test_what_no_layer_holds_is_refused():
    with pytest.raises(CallError, match=r"expected a torch\.nn\.Module"):
        CircuitProbe({"a": 1})
