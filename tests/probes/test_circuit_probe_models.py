"""CircuitProbe on models of other libraries: fused weights, grouped heads, rotary positions, bridges."""

import warnings
from typing import Any

import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.circuits.algebra.factor_steps import LARGEST_DISAGREEMENT, OMEGA_QUANTITIES, STEP_QUANTITIES
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.probes import CircuitProbe
from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from .circuit_models import cosine, dense_omega, language_loss, language_model


def by_place(probe: CircuitProbe) -> dict[tuple[int, int, str], dict[Any, Any]]:
    """The rows of step 1 by layer, head and circuit."""
    rows = probe.table().query("step == 1").to_dict("records")
    return {(row["layer"], row["head"], row["circuit"]): row for row in rows}


def conv1d_factors(model, gradient=False):
    """A and B of GPT-2's heads by hand from c_attn, which keeps queries, keys and values one after another."""
    found = {}
    for layer, block in enumerate(model.transformer.h):
        parameters = [block.attn.c_attn.weight, block.attn.c_attn.bias, block.attn.c_proj.weight]
        W, b, written = (parameter.grad if gradient else parameter.detach() for parameter in parameters)
        heads, width = block.attn.num_heads, block.attn.head_dim
        Q, K, V = torch.cat([W, b[None]]).chunk(3, dim=1)
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            found[layer, head, "QK"] = (K[:, part].clone(), Q[:, part].T.clone())
            found[layer, head, "OV"] = (written[part].T.clone(), V[:, part].T.clone())
    return found


def test_the_fused_weights_of_gpt2_come_apart():
    """With pseudo-inverses for a G that has these factors' gradients: Omega's step is the same for each such G."""
    model = language_model("gpt2")
    stepping = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = CircuitProbe(model, every=1)
    before = conv1d_factors(model)
    language_loss(model, 0).backward()
    gradients = conv1d_factors(model, gradient=True)
    stepping.step()
    probe.step()
    after = conv1d_factors(model)
    rows = by_place(probe)
    assert set(rows) == set(before)
    for place, (A, B) in before.items():
        G_A, G_B = gradients[place]
        inverse_A, inverse_B = torch.linalg.pinv(A), torch.linalg.pinv(B)
        G = inverse_A.T @ G_B + G_A @ inverse_B.T - inverse_A.T @ A.T @ G_A @ inverse_B.T
        exact, omega, taken = A @ G_B + G_A @ B, dense_omega(A @ B, G), after[place][0] @ after[place][1] - A @ B
        row = rows[place]
        assert row["gradient_disagreement"] < 1e-11
        assert row["exact_step_norm"] == pytest.approx(float(exact.norm()), rel=1e-8)
        assert row["omega_cosine"] == pytest.approx(cosine(omega, exact), abs=1e-8)
        assert row["omega_relative_error"] == pytest.approx(float((omega - exact).norm() / exact.norm()), rel=1e-6)
        assert row["taken_exact_cosine"] == pytest.approx(-cosine(taken, exact), abs=1e-8)


def grouped_products(attention):
    """By hand: W_K [W_Q1', W_Q2'] and [W_O1; W_O2] W_V of each two of four heads of width 4."""
    Q, K, V, O = (getattr(attention, f"{side}_proj").weight.detach().clone() for side in "qkvo")  # noqa: E741
    found = {}
    for group in (0, 1):
        own, first, second = (slice(4 * at, 4 * at + 4) for at in (group, 2 * group, 2 * group + 1))
        found["QK", group] = K[own].T @ torch.cat([Q[first], Q[second]], dim=1)
        found["OV", group] = torch.cat([O[:, first], O[:, second]]) @ V[own]
    return found


def test_rotary_positions_leave_the_step_and_take_omega():
    """The exact step against a step of gradient descent so small that its second order is not seen."""
    model = language_model("llama")
    rate = 1e-7
    stepping = torch.optim.SGD(model.parameters(), rate)
    probe = CircuitProbe(model, every=1)
    before = grouped_products(model.model.layers[0].self_attn)
    language_loss(model, 0).backward()
    stepping.step()
    probe.step()
    after = grouped_products(model.model.layers[0].self_attn)
    rows = probe.table().query("step == 1")
    assert len(rows) == 8
    for row in rows.to_dict("records"):
        place = row["circuit"], row["key_value_head"]
        moved = (after[place] - before[place]) / rate
        assert row["exact_step_norm"] == pytest.approx(float(moved.norm()), rel=1e-5)
        assert row["taken_exact_cosine"] == pytest.approx(1.0, abs=1e-9)
        assert row["taken_rate"] == pytest.approx(rate, rel=1e-5)
    of_qk, of_ov = rows[rows["circuit"] == "QK"], rows[rows["circuit"] == "OV"]
    assert of_qk[list(OMEGA_QUANTITIES)].isna().all(axis=None)
    assert of_ov[list(OMEGA_QUANTITIES)].notna().all(axis=None)
    assert (of_qk["gradient_disagreement"] > LARGEST_DISAGREEMENT).all()
    assert (of_ov["gradient_disagreement"] < 1e-12).all()


def test_omega_is_not_told_of_rotated_circuits_however_well_the_gradients_agree():
    """All tokens at one position, so that nothing is rotated: what is told of the layer holds, not what is seen."""
    model = language_model("llama")
    probe = CircuitProbe(model, every=1)
    tokens = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, position_ids=torch.zeros_like(tokens)).logits.square().sum().backward()
    torch.optim.SGD(model.parameters(), 1e-4).step()
    probe.step()
    of_qk = probe.table().query("step == 1 and circuit == 'QK'")
    assert (of_qk["gradient_disagreement"] < 1e-10).all()
    assert of_qk[list(OMEGA_QUANTITIES)].isna().all(axis=None)


def test_all_reasons_why_circuits_are_not_tested_are_in_the_store(tmp_path):
    model = language_model("llama")
    model.model.layers[0].self_attn.v_proj.weight.requires_grad_(False)
    probe = CircuitProbe(model, tmp_path / "run")
    assert RunStore(tmp_path / "run").description()["untested"] == [
        {"circuit": "QK", "layers": ["0"], "reason": "positions rotate queries and keys"},
        {"circuit": "OV", "layers": ["0"], "reason": "not all of its weights are trained"},
    ]
    probe.add_scalars(7, told=1.0)
    assert "training_told" not in probe.table()
    probe.add_scalars(0, told=1.0)
    assert (probe.table()["training_told"] == 1).all()


def test_gradients_of_low_precision_are_still_those_of_one_product():
    """Up to the precision of eight bits, in which the model computes them."""
    cosines = []
    for dtype in (torch.float64, torch.bfloat16):
        model = language_model("gpt2").to(dtype)
        probe = CircuitProbe(model, every=1)
        language_loss(model, 0).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        probe.step()
        cosines.append([row["omega_cosine"] for row in by_place(probe).values()])
    assert cosines[1] == pytest.approx(cosines[0], abs=2.0**-6)


def interface_products(bridge):
    """W_K W_Q' and W_O' W_V' by the interface, the biases as one row or column more."""
    found = {}
    for layer, block in enumerate(bridge.blocks):
        W = {side: getattr(block.attn, f"W_{side}").detach().double() for side in "QKVO"}
        b = {side: getattr(block.attn, f"b_{side}").detach().double() for side in "QKV"}
        tall = {side: torch.cat([W[side], b[side][:, None]], dim=1) for side in "QKV"}
        for head in range(len(W["Q"])):
            found[layer, head, "QK"] = tall["K"][head] @ tall["Q"][head].T
            found[layer, head, "OV"] = W["O"][head].T @ tall["V"][head].T
    return found


def test_a_bridge_is_followed_by_the_parameters_that_it_trains():
    kind: Any = TransformerBridge
    sizes = {"d_model": 24, "d_head": 8, "n_heads": 3, "n_layers": 2, "n_ctx": 16, "d_vocab": 20}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = kind.boot_native(TransformerBridgeConfig(**sizes, act_fn="gelu", attn_only=True, device="cpu"))
    with torch.no_grad():
        for parameter in bridge.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    probe = CircuitProbe(bridge, every=1)
    rate = 1e-2
    before = interface_products(bridge)
    tokens = torch.randint(0, 20, (4, 8))
    bridge(tokens, return_type="logits").log_softmax(-1)[..., 3].mean().neg().backward()
    torch.optim.SGD(bridge.parameters(), rate).step()
    probe.step()
    after = interface_products(bridge)
    rows = by_place(probe)
    assert set(rows) == set(before)
    for place, C in before.items():
        # Single precision, and a step of the first order but for a part that is as small as the rate.
        taken = after[place] - C
        assert rows[place]["taken_step_norm"] == pytest.approx(float(taken.norm()), rel=1e-4)
        assert rows[place]["exact_step_norm"] == pytest.approx(float(taken.norm()) / rate, rel=2e-2)
        assert rows[place]["taken_exact_cosine"] > 0.999
        assert rows[place]["gradient_disagreement"] < 1e-5


class Collapsed(nn.Module):
    """An attention whose W_QK is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in (("W_QK", (2, 6, 6)), ("W_V", (2, 6, 3)), ("W_O", (2, 3, 6))):
            setattr(self, name, nn.Parameter(torch.randn(*shape, dtype=torch.float64)))

    def forward(self, x):
        pattern = (x @ self.W_QK.mT @ x.mT).softmax(dim=-1)
        return (pattern @ x @ self.W_V @ self.W_O).sum(0)


def test_a_circuit_that_is_trained_whole_has_no_test():
    model = Collapsed()
    tensors = {name: f"W_{name}" for name in ("QK", "V", "O")}
    mapping = parse_mapping({"tensors": tensors, "layout": "transformer_lens"}, "a mapping")
    probe = CircuitProbe(model, every=1, mapping=mapping)
    model(torch.randn(5, 6, dtype=torch.float64)).tanh().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    probe.step()
    rows = probe.table().query("step == 1")
    assert rows[rows["circuit"] == "QK"][list(STEP_QUANTITIES)].isna().all(axis=None)
    assert rows[rows["circuit"] == "OV"][list(STEP_QUANTITIES)].notna().all(axis=None)
    assert (rows["change_norm"] > 0).all()
