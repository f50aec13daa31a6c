"""CircuitProbe on models with adapters of PEFT: their changes and steps by dense algebra, gradients never made up."""

import copy
import warnings
from typing import Any

import numpy as np
import peft
import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.circuits import CallError, QkovError
from qkov.circuits.algebra.factor_steps import STEP_QUANTITIES
from qkov.probes import CircuitProbe, CircuitRates, circuit_parameter_groups
from qkov.probes.training.adapter_changes import ADAPTER_QUANTITIES

from ..circuits.adapted_models import NOT_OURS
from .circuit_models import language_loss, language_model

pytestmark = pytest.mark.filterwarnings(*NOT_OURS)

LORA = {"r": 2, "lora_alpha": 3, "fan_in_fan_out": True}


def with_lora(kind: str = "gpt2", **changes: Any) -> Any:
    torch.manual_seed(1)
    settings = LORA | {"target_modules": ["c_attn", "c_proj"]} if kind == "gpt2" else {"r": 2, "lora_alpha": 3}
    model = peft.get_peft_model(
        language_model(kind), peft.LoraConfig(**(settings | changes)), autocast_adapter_dtype=False
    )
    return model.double()


def weights_of(layer: Any, on: bool = True) -> torch.Tensor:
    """W_0 + s B A of a layer, with its inputs as rows, by hand."""
    if not hasattr(layer, "lora_A"):
        return layer.weight.detach().clone()
    W = layer.base_layer.weight.detach().clone()
    if on and not layer.merged_adapters:
        for name in layer.active_adapters:
            B, A = layer.lora_B[name].weight.detach(), layer.lora_A[name].weight.detach()
            W = W + layer.scaling[name] * (B @ A).T
    return W


def products(model: Any, on: bool = True, biases: bool = False) -> dict[tuple[int, int, str], torch.Tensor]:
    """W_K W_Q' and W_O' W_V' of the heads of a GPT-2 by hand, with the biases as one row or column more if wanted."""
    found = {}
    for number, block in enumerate(model.get_base_model().transformer.h):
        attention = block.attn
        W, written = weights_of(attention.c_attn, on), weights_of(attention.c_proj, on)
        if biases:
            W = torch.cat([W, attention.c_attn.bias.detach()[None]])
        Q, K, V = W.chunk(3, dim=1)
        for head in range(attention.num_heads):
            part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            found[number, head, "QK"] = K[:, part] @ Q[:, part].T
            found[number, head, "OV"] = written[part].T @ V[:, part].T
    return found


def assert_changes(row: dict[str, Any], now: torch.Tensor, base: torch.Tensor, rank: int | None) -> None:
    """Compare the columns of a row with the change of the dense product."""
    change = now - base
    s = torch.linalg.svdvals(change)
    expected = {
        "change_norm": float(change.norm()),
        "relative_change": float(change.norm() / base.norm()),
        "spectral_norm": float(s[0]),
    }
    if rank is not None:
        assert row["adapter_rank"] == rank
        assert len(row["adapter_singular_values"]) == rank
        torch.testing.assert_close(
            torch.tensor(list(row["adapter_singular_values"])).double(), s[:rank], rtol=1e-7, atol=1e-10
        )
        w = s[:rank] / s[:rank].sum()
        expected |= {
            "stable_rank": float((s.norm() / s[0]) ** 2),
            "effective_rank": float(torch.special.entr(w).sum().exp()),
        }
    for name, value in expected.items():
        assert row[f"adapter_{name}"] == pytest.approx(value, rel=1e-9), name


def optimizer_of(model: Any, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], rate)


@pytest.mark.parametrize("way", ["given", "step", "by hand"])
def test_what_adapters_make_of_each_circuit_and_each_step_is_that_of_dense_products(tmp_path, way):
    model = with_lora()
    optimizer = optimizer_of(model)
    probe = CircuitProbe(
        model, tmp_path / "run", every=1, optimizer=optimizer if way == "given" else None, on_error="raise"
    )
    expected = {0: (products(model), {})}
    for step in (1, 2, 3):
        before = products(model, biases=True)
        optimizer.zero_grad()
        loss = language_loss(model, step)
        loss.backward()
        if way == "by hand":
            probe.begin_step()
        optimizer.step()
        if way == "by hand":
            probe.end_step()
        else:
            probe.step(loss)
        after = products(model, biases=True)
        expected[step] = products(model), {place: float((after[place] - before[place]).norm()) for place in after}
    base = products(model, on=False)
    rows = RunStore(tmp_path / "run").table().to_dict("records")
    assert len(rows) == 4 * len(base)
    for row in rows:
        place, (now, taken) = (row["layer"], row["head"], row["circuit"]), expected[row["step"]]
        if row["step"] == 0:
            assert row["adapter_change_norm"] == row["adapter_rank"] == 0
            continue
        # Of rank 2 in both factors, each of width 4.
        assert_changes(row, now[place], base[place], 4)
        assert row["taken_step_norm"] == pytest.approx(taken[place], rel=1e-9)
        assert row["frobenius_norm"] == pytest.approx(float(now[place].norm()), rel=1e-9)
        # None of the others is known without gradients of the factors.
        assert all(row[name] != row[name] for name in STEP_QUANTITIES if name != "taken_step_norm")
    assert RunStore(tmp_path / "run").description()["untested"] == [
        {
            "circuit": circuit,
            "layers": ["0", "1"],
            "reason": "its weights are made with adapters (lora), which have gradients in place of the weights",
        }
        for circuit in ("QK", "OV")
    ]


def test_training_with_adapters_is_the_same_to_the_bit_with_and_without_a_probe():
    trained = []
    for is_watched in (False, True):
        model = with_lora(lora_dropout=0.1)
        model.train()
        optimizer = optimizer_of(model)
        torch.manual_seed(0)
        probe = CircuitProbe(model, every=1, optimizer=optimizer, on_error="raise") if is_watched else None
        for step in range(4):
            optimizer.zero_grad()
            language_loss(model, step).backward()
            optimizer.step()
        assert probe is None or probe.steps == 4
        trained.append(model.state_dict())
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())


def test_a_probe_follows_a_model_through_adapters_and_their_merging():
    """Begun with the base, then with adapters, then merged in float32, then trained as a whole."""
    torch.manual_seed(1)
    base = language_model("gpt2").float()
    start = copy.deepcopy(base)
    probe = CircuitProbe(base, every=1, on_error="raise")
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA, target_modules=["c_attn"]))

    def trained(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        with probe.attach(optimizer):
            optimizer.zero_grad()
            language_loss(model, step).backward()
            optimizer.step()

    optimizer = optimizer_of(model)
    for step in (1, 2):
        trained(model, optimizer, step)
    of_base = products(model, on=False)
    merged: Any = model.merge_and_unload()
    merged.requires_grad_()
    trained(merged, torch.optim.SGD(merged.parameters(), 0.0), 3)
    assert probe.steps == 3
    rows: Any = probe.table()
    assert rows.query("step == 0")[list(ADAPTER_QUANTITIES)].isna().all(axis=None)
    for row in rows.query("step == 3").to_dict("records"):
        place = row["layer"], row["head"], row["circuit"]
        earlier = rows.query("step == 2").set_index(["layer", "head", "circuit"]).loc[place]
        # Rounded to float32, and of the same rank.
        for name in ("adapter_change_norm", "adapter_spectral_norm", "adapter_stable_rank"):
            assert row[name] == pytest.approx(earlier[name], rel=1e-4)
        assert row["adapter_rank"] == earlier["adapter_rank"] == (4 if row["circuit"] == "QK" else 2)
    for block, other in zip(start.transformer.h, base.transformer.h, strict=True):
        assert not torch.equal(block.attn.c_attn.weight, other.attn.c_attn.weight)
    for place, product in of_base.items():
        row = rows.query("step == 2").set_index(["layer", "head", "circuit"]).loc[place]
        assert row["adapter_change_norm"] == pytest.approx(
            row["adapter_relative_change"] * float(product.norm()), rel=1e-5
        )


def test_adapters_elsewhere_do_not_matter():
    model = with_lora("llama", target_modules=["up_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = CircuitProbe(model, every=1, on_error="raise")
        optimizer = optimizer_of(model)
        for step in (1, 2):
            optimizer.zero_grad()
            language_loss(model, step).backward()
            optimizer.step()
            probe.step()
    rows = probe.table()
    assert not set(ADAPTER_QUANTITIES) & set(rows)
    assert (rows.query("step > 0")["change_norm"] == 0).all()
    with pytest.raises(CallError, match="AdamW holds no attention parameter of the model"):
        CircuitProbe(model, optimizer=optimizer)


def test_weights_that_are_trained_beside_adapters_keep_their_figures():
    """W_V and W_O are trained as copies, and their step is told; W_Q is made with adapters."""
    model = with_lora("llama", target_modules=["q_proj"], modules_to_save=["v_proj", "o_proj"])
    plain = language_model("llama")
    rows = []
    for watched in (model, plain):
        parameters = [
            parameter
            for name, parameter in watched.named_parameters()
            if parameter.requires_grad and ("v_proj" in name or "o_proj" in name)
        ]
        optimizer = torch.optim.SGD(parameters, 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probe = CircuitProbe(watched, every=1, optimizer=optimizer, on_error="raise")
        language_loss(watched, 1).backward()
        optimizer.step()
        rows.append(probe.table().query("step == 1"))
    names = ["exact_step_norm", "omega_cosine", "taken_rate", "taken_step_norm"]
    of_ov, of_plain = (table.query("circuit == 'OV'")[names].to_numpy() for table in rows)
    np.testing.assert_allclose(of_ov, of_plain, rtol=1e-10)
    assert rows[0].query("circuit == 'QK'")["exact_step_norm"].isna().all()


def test_an_optimizer_of_other_parameters_is_told_from_that_of_the_adapters():
    model = with_lora("llama", target_modules=["q_proj", "up_proj"])
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_attention = [parameter for name, parameter in named.items() if "q_proj" in name]
    others = [parameter for name, parameter in named.items() if "q_proj" not in name]
    with pytest.raises(CallError, match="AdamW holds no attention parameter of the model: give the optimizer that tra"):
        CircuitProbe(model, optimizer=torch.optim.AdamW(others))
    with pytest.warns(UserWarning, match=r"trains base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_B\.def"):
        CircuitProbe(model, optimizer=torch.optim.AdamW(of_attention[:1]))


def test_gradients_of_adapters_that_are_0_are_told():
    model = with_lora()
    optimizer = optimizer_of(model)
    probe = CircuitProbe(model, every=1, optimizer=optimizer)
    language_loss(model, 1).backward()
    optimizer.zero_grad(set_to_none=False)
    with pytest.warns(UserWarning, match="the gradients of all attention weights are 0 or missing at step 1"):
        optimizer.step()
    assert probe.failures == 0


def test_micro_batches_of_adapters_are_no_steps_without_an_optimizer_of_torch():
    model = with_lora()
    probe = CircuitProbe(model, every=1, on_error="raise")
    for number in range(4):
        language_loss(model, number).backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if number % 2:
            with torch.no_grad():
                for parameter in trained:
                    parameter -= 0.1 * parameter.grad
        probe.step()
        if number % 2:
            model.zero_grad()
    assert probe.steps == 2


def test_what_cannot_be_taken_out_is_said_once_and_the_rest_is_measured():
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(language_model("llama"), config, autocast_adapter_dtype=False)
    model.merge_adapter()
    with pytest.warns(UserWarning, match="the change that adapters make is not measured: .*ia3") as caught:
        probe = CircuitProbe(model, every=1)
    assert len(caught) == 1
    assert "adapter_rank" not in probe.table()
    assert (probe.table()["frobenius_norm"] > 0).all()


def test_columns_of_adapters_that_come_late_are_missing_before(tmp_path):
    model = language_model("gpt2")
    probe = CircuitProbe(model, tmp_path / "run", every=1, on_error="raise")
    assert RunStore(tmp_path / "run").description()["untested"] == []
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**LORA, target_modules=["c_attn"])).double()
    optimizer = optimizer_of(adapted)
    with probe.attach(optimizer):
        language_loss(adapted, 1).backward()
        optimizer.step()
    store = RunStore(tmp_path / "run")
    reasons = {(untested["circuit"], untested["reason"]) for untested in store.description()["untested"]}
    made = "its weights are made with adapters (lora), which have gradients in place of the weights"
    assert reasons == {("QK", made), ("OV", made)}
    rows = store.table()
    assert rows.query("step == 0")["adapter_singular_values"].isna().all()
    assert rows.query("step == 1")["adapter_singular_values"].map(len).tolist() == [2, 4] * 6


def test_rates_of_circuits_are_refused_for_weights_that_adapters_make():
    model = with_lora("llama", target_modules=["q_proj"])
    expected = r"q_proj\.weight is made with adapters \(lora\) and is not a parameter itself: merge them first"
    with pytest.raises(QkovError, match=expected):
        circuit_parameter_groups(model, lr=0.1, qk=30.0)
    with pytest.raises(QkovError, match=expected):
        CircuitRates(optimizer_of(model), model, qk=30.0)
