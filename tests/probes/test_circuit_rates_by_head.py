"""Rates of layers and single heads: against models in which each head's weights are parameters at their own rates."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.dynamics import Parameterization, SingleLayerAttention
from qkov.circuits import CallError, read_mapping
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.probes import CircuitRates
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..circuits.family_proof import small
from .fused_models import BY_NAME, VOCABULARY, Fused, batches, largest_difference, loss_of, train

LR, HEADS = 1e-2, 4
#: A multiplier for each layer and head. Those of QK are equal in pairs, since some of the models share keys in pairs.
QK = torch.tensor([[30.0, 30.0, 1.0, 1.0], [5.0, 5.0, 0.25, 0.25]], dtype=torch.float64)
OV = torch.tensor([[2.0, 2.0, 3.0, 3.0], [1.0, 1.0, 7.0, 7.0]], dtype=torch.float64)


class Blocks(nn.Module):
    """A weight formed of blocks of its slices along a dimension."""

    def __init__(self, places: list[list[int]], dimension: int) -> None:
        super().__init__()
        self.places, self.dimension = places, dimension
        self.order = torch.tensor([place for block in places for place in block]).argsort()

    def forward(self, *blocks: Tensor) -> Tensor:
        return torch.cat(blocks, self.dimension).index_select(self.dimension, self.order)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.index_select(self.dimension, torch.tensor(places)) for places in self.places)


def cut(places: list[int], heads: int) -> list[list[int]]:
    """The places of each head's slices, which lie in the order of the heads."""
    size = len(places) // heads
    return [places[head * size : (head + 1) * size] for head in range(heads)]


def twin_at_rates(fused: Fused, model: nn.Module, lr: float) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model with each head's W_Q, W_K, W_V and W_O as parameters of their own, in groups at their own rates."""
    twin = copy.deepcopy(model)
    groups = []
    for layer in range(fused.layers):
        query, key, value = fused.places
        few = len(key) * HEADS // len(query)
        # For each block its multiplier: those of grouped heads are those of their first head.
        blocks = [(part, QK[layer, head].item()) for head, part in enumerate(cut(query, HEADS))]
        blocks += [(part, QK[layer, head * HEADS // few].item()) for head, part in enumerate(cut(key, few))]
        blocks += [(part, OV[layer, head * HEADS // few].item()) for head, part in enumerate(cut(value, few))]
        of_output = [(part, OV[layer, head].item()) for head, part in enumerate(cut([*range(len(query))], HEADS))]
        for path, dimension, parts in (
            (fused.projection, fused.dimension, blocks),
            (fused.output, 1 - fused.dimension, of_output),
        ):
            of_module, _, name = path.format(layer=layer).rpartition(".")
            module: Any = twin.get_submodule(of_module)
            parametrize.register_parametrization(module, name, Blocks([part for part, _ in parts], dimension))
            own = module.parametrizations[name]
            groups += [
                {"params": [getattr(own, f"original{at}")], "lr": lr * multiplier}
                for at, (_, multiplier) in enumerate(parts)
            ]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    rest = [parameter for parameter in twin.parameters() if id(parameter) not in held]
    return twin, [*groups, {"params": rest, "lr": lr}]


#: GPT-2 keeps its heads in columns and rows; NeoX alternates; nanoGPT's output is (out, in); the keys of Falcon and
#: Phi-3 are shared by pairs of heads.
MODELS = (
    "GPT-2",
    "GPT-NeoX",
    "nanoGPT",
    "Falcon, grouped heads",
    "Phi-3, grouped heads",
    "torch.nn.MultiheadAttention",
)


@pytest.mark.parametrize("name", MODELS)
def test_each_head_learns_as_if_it_were_a_parameter_at_its_own_rate(name):
    fused = BY_NAME[name]
    model = fused.model(torch.float64)
    lr = 1e-4
    twin, groups = twin_at_rates(fused, model, lr)
    assert largest_difference(model, twin) == 0
    of_model = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    with CircuitRates(of_model, model, QK, OV, **dict(fused.options)):
        train(model, of_model, 20)
    train(twin, torch.optim.AdamW(groups, weight_decay=0.1), 20)
    assert largest_difference(model, fused.model(torch.float64)) > 0.02
    # Phi-3 computes its norms in float32, where a difference of 1e-15 may round to one of 1e-7.
    assert largest_difference(model, twin) < (1e-7 if "Phi" in name else 1e-10)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = small("LlamaConfig", vocab_size=VOCABULARY, attention_bias=True, **changes)
    return transformers.LlamaForCausalLM(config).double()


def steps_of(model, optimizer) -> dict[str, Any]:
    """How many times rate and gradient every entry moves in a step."""
    model.zero_grad()
    loss_of(model, next(batches(1))).backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    return {
        name: ((before[name] - parameter.detach()) / (LR * parameter.grad)).numpy()
        for name, parameter in model.named_parameters()
    }


def sgd(model) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR)


def assert_times(found, expected):
    np.testing.assert_allclose(np.nanmedian(found, axis=1), expected, rtol=1e-5)


def test_a_mapping_names_layers_and_heads_and_leaves_the_rest_at_the_base_rate():
    model = llama(num_hidden_layers=3)
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model, {"layer 0": 5.0, 1: 3.0, (1, 2): 7.0, ("", 2): [1, 2, 3, 4]}, {(2, 3): 9.0})
    steps = steps_of(model, optimizer)
    path = "model.layers.{}.self_attn.{}_proj.weight"
    expected = {0: [5.0] * 4, 1: [3.0, 3.0, 7.0, 3.0], 2: [1.0, 2.0, 3.0, 4.0]}
    for layer, multipliers in expected.items():
        for side in "qk":
            assert_times(steps[path.format(layer, side)], np.repeat(multipliers, 12))
        assert_times(steps[path.format(layer, "v")], np.repeat([1, 1, 1, 9.0 if layer == 2 else 1], 12))
        assert_times(steps[path.format(layer, "o")].T, np.repeat([1, 1, 1, 9.0 if layer == 2 else 1], 12))
    assert_times(steps["model.layers.1.self_attn.q_proj.bias"][:, None], np.ones(48))
    assert rates.describe().splitlines()[:3] == [
        "QK: 7 times the base rate in head 2 of layer 1, 1,152 of 4,608 entries in "
        "model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.k_proj.weight",
        "QK: 5 times the base rate in layer 0, 4,608 entries in "
        "model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight",
        "QK: 4 times the base rate in head 3 of layer 2, 1,152 of 4,608 entries in "
        "model.layers.2.self_attn.q_proj.weight, model.layers.2.self_attn.k_proj.weight",
    ]
    where = "heads 0, 1 and 3 of layer 1, head 2 of layer 2"
    assert f"QK: 3 times the base rate in {where}, 4,608 of 9,216 entries in " in rates.describe()


def test_biases_of_a_head_learn_with_it_and_that_of_the_output_belongs_to_all_heads():
    model = llama()
    optimizer = sgd(model)
    CircuitRates(optimizer, model, {(0, 1): 4.0}, biases=True).remove()
    CircuitRates(optimizer, model, {(0, 1): 4.0}, {1: 3.0}, biases=True)
    steps = steps_of(model, optimizer)
    assert_times(steps["model.layers.0.self_attn.q_proj.bias"][:, None], np.repeat([1.0, 4.0, 1.0, 1.0], 12))
    assert_times(steps["model.layers.1.self_attn.v_proj.bias"][:, None], np.full(48, 3.0))
    assert_times(steps["model.layers.1.self_attn.o_proj.bias"][:, None], np.full(48, 3.0))
    with pytest.raises(CallError, match=r"heads 0 to 3 of layer 1 share b_O in model\.layers\.1.*have 1 and 3"):
        CircuitRates(sgd(model), llama(), ov={(1, 0): 3.0}, biases=True)


@pytest.mark.parametrize("layout", ["head d_model d_head", "d_head head d_model"])
def test_heads_along_any_dimension_of_three(layout):
    """Against numpy, where heads are indexed along a dimension of their own."""
    axis = layout.split().index("head")
    sizes = {"head": 3, "d_model": 6, "d_head": 2}
    generator = torch.Generator().manual_seed(0)

    def weight() -> Tensor:
        return torch.randn([sizes[name] for name in layout.split()], generator=generator, dtype=torch.float64)

    model = nn.ParameterDict({role: weight() for role in "QKVO"})
    mapping = parse_mapping({"tensors": {role: role for role in "QKVO"}, "layout": dict.fromkeys("QKVO", layout)}, "m")
    optimizer = sgd(model)
    CircuitRates(optimizer, model, torch.tensor([[2.0, 3.0, 5.0]]), torch.tensor([4.0]), mapping=mapping)
    before = {role: parameter.detach().numpy().copy() for role, parameter in model.items()}
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shape = [1, 1, 1]
    shape[axis] = 3
    for role, parameter in model.items():
        multipliers = np.array([2.0, 3.0, 5.0] if role in "QK" else [4.0] * 3).reshape(shape)
        np.testing.assert_allclose(parameter.detach().numpy(), before[role] - LR * multipliers, rtol=0, atol=1e-14)


def test_heads_of_the_single_layer_model_in_all_its_runs():
    model = SingleLayerAttention(4, 3, Parameterization.FACO, heads=2, runs=3)
    optimizer = sgd(model)
    CircuitRates(optimizer, model, torch.tensor([[2.0, 3.0]]), {(0, 1): 5.0})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, multipliers in (("W_Q", [2, 3]), ("W_K", [2, 3]), ("W_OV", [1, 5])):
        found = model.get_parameter(name).detach().numpy()
        expected = -LR * np.array(multipliers, dtype=float).reshape(1, 2, 1, 1) * np.ones_like(found)
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_a_head_s_multiplier_may_change_from_step_to_step():
    """What a guard that slows single heads needs; keys that heads share learn at the lowest of their multipliers."""
    model = llama(num_key_value_heads=2)
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model, 6.0)
    rates._set_multiplier("QK", ("", 1), 1, 0.5)
    steps = steps_of(model, optimizer)
    assert_times(steps["model.layers.0.self_attn.q_proj.weight"], np.full(48, 6.0))
    assert_times(steps["model.layers.1.self_attn.q_proj.weight"], np.repeat([6.0, 0.5, 6.0, 6.0], 12))
    assert_times(steps["model.layers.1.self_attn.k_proj.weight"], np.repeat([0.5, 6.0], 12))
    rates._set_multiplier("QK", ("", 1), 1, 6.0)
    steps = steps_of(model, optimizer)
    assert_times(steps["model.layers.1.self_attn.k_proj.weight"], np.full(24, 6.0))


def test_a_head_s_multiplier_may_change_where_none_had_one_before():
    model = llama()
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model, 1.0)
    assert not optimizer._optimizer_step_pre_hooks
    rates._set_multiplier("OV", ("", 0), 2, 0.25)
    steps = steps_of(model, optimizer)
    assert_times(steps["model.layers.0.self_attn.v_proj.weight"], np.repeat([1.0, 1.0, 0.25, 1.0], 12))
    assert_times(steps["model.layers.0.self_attn.o_proj.weight"].T, np.repeat([1.0, 1.0, 0.25, 1.0], 12))
    assert_times(steps["model.layers.0.self_attn.q_proj.weight"], np.ones(48))
    rates.remove()
    rates._set_multiplier("OV", ("", 0), 2, 0.5)
    assert not optimizer._optimizer_step_pre_hooks


def test_heads_of_one_matrix_that_come_to_differ_are_told_under_an_optimizer_of_whole_matrices():
    model = llama()
    muon = torch.optim.Muon([one for name, one in model.named_parameters() if ".layers." in name and one.ndim == 2])
    rates = CircuitRates(muon, model, 3.0)
    query = model.model.layers[1].self_attn.q_proj.weight
    assert rates.scales(muon, query)
    rates._set_multiplier("QK", ("", 1), 0, 1.0)
    loss_of(model, next(batches(1))).backward()
    told = r"^model\.layers\.1\..*q_proj\.weight .* learns at the base rate: .* holds heads with different.*more, see"
    with pytest.warns(UserWarning, match=told):
        muon.step()
    assert not rates.scales(muon, query)
    assert rates.scales(muon, model.model.layers[0].self_attn.q_proj.weight)


def test_multipliers_of_heads_take_the_memory_of_one_dimension():
    model = BY_NAME["GPT-2"].model(torch.float64)
    rates = CircuitRates(sgd(model), model, {(0, 0): 3.0}, 2.0)
    of_layer = [part for part in rates._scaled if ".0." in part.entries.name]
    shapes = [part.multipliers.shape if isinstance(part.multipliers, Tensor) else part.multipliers for part in of_layer]
    # Heads are columns of c_attn, of 24 inputs; the values and the output have one number.
    assert shapes == [(1, 72), 2.0, 2.0]


def test_in_float32_and_on_a_model_that_changes_its_type():
    model = llama()
    optimizer = sgd(model)
    CircuitRates(optimizer, model, {(0, 0): 4.0})
    assert_times(steps_of(model, optimizer)["model.layers.0.self_attn.q_proj.weight"], np.repeat([4.0, 1, 1, 1], 12))
    model.float()
    found = np.nanmedian(steps_of(model, optimizer)["model.layers.0.self_attn.q_proj.weight"], axis=1)
    np.testing.assert_allclose(found, np.repeat([4.0, 1, 1, 1], 12), rtol=1e-2)


def t5() -> Any:
    settings = {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))


def test_stacks_are_named():
    model = t5()
    rates = CircuitRates(sgd(model), model, {"encoder layer 1": 3.0, ("decoder", 0): 5.0, ("decoder cross", 1, 2): 7.0})
    told = [line.partition(", ")[0] for line in rates.describe().splitlines()]
    assert told[:3] == [
        "QK: 7 times the base rate in head 2 of decoder cross layer 1",
        "QK: 5 times the base rate in decoder layer 0",
        "QK: 3 times the base rate in encoder layer 1",
    ]
    rates.remove()
    with pytest.raises(CallError, match="qk names 0, which may be any of encoder layer 0, decoder layer 0"):
        CircuitRates(sgd(model), model, {0: 3.0})
    with pytest.raises(CallError, match="qk is a tensor, but the model has several stacks, encoder layers 0 and 1"):
        CircuitRates(sgd(model), model, torch.ones(6))


@pytest.mark.parametrize(
    ("qk", "told"),
    [
        ({5: 2.0}, r"qk names 5, but the model has layers 0 and 1 with this circuit: a key is a layer's number"),
        ({"layer 7": 2.0}, r"qk names 'layer 7', but the model has layers 0 and 1"),
        ({(0, 1, 2): 2.0}, r"qk names \(0, 1, 2\), but the model has layers 0 and 1"),
        ({(0, 4): 2.0}, r"qk names \(0, 4\), but layer 0 has the heads 0 to 3"),
        ({(0, -1): 2.0}, r"qk names \(0, -1\), but layer 0 has the heads 0 to 3"),
        ({0: 2.0, "layer 0": 3.0}, r"qk names layer 0 twice, as 0 and as 'layer 0'"),
        ({0: [2.0, 3.0]}, r"at 0, qk should have a number, or one for each of 4 heads, got \[2\.0, 3\.0\]"),
        ({(0, 1): [2.0] * 4}, r"at \(0, 1\), qk should have a number, got \[2\.0, 2\.0, 2\.0, 2\.0\]"),
        ({0: [[2.0]] * 4}, r"the multiplier qk of 0 at 0 should be a finite number above 0, got \[2\.0\]"),
        ({0: torch.ones(4, 1)}, r"at 0, qk should have a number, or one for each of 4 heads, got tensor"),
        ({0: 0.0}, r"the multiplier qk of 0 should be a finite number above 0, got 0\.0"),
        ({0: [1.0, "a"]}, r"the multiplier qk of 0 at 1 should be a finite number above 0, got 'a'"),
        (torch.ones(3), r"qk should have the shape \[2\] or \[2, 4\], for layers 0 and 1, got \[3\]"),
        (torch.ones(2, 3), r"qk should have the shape \[2\] or \[2, 4\], for layers 0 and 1, got \[2, 3\]"),
        (-torch.ones(2), r"the multiplier qk at 0 should be a finite number above 0, got -1\.0"),
        ({(0, 0): 2.0}, r"heads 0 to 1 of layer 0 share W_K in model\.layers\.0\.self_attn\.k_proj\.weight, so they "),
    ],
)
def test_multipliers_that_do_not_fit_the_model_are_refused(qk, told):
    model = llama(num_key_value_heads=2)
    optimizer = sgd(model)
    with pytest.raises(CallError, match=rf"^{told}"):
        CircuitRates(optimizer, model, qk)
    assert not optimizer._optimizer_step_pre_hooks


def test_layers_that_share_weights_have_one_multiplier():
    model = llama()
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    CircuitRates(sgd(model), model, 3.0)
    with pytest.raises(CallError, match=r"layer 0 and layer 1 share .*q_proj\.weight, so they need one .*have 3 and 1"):
        CircuitRates(sgd(model), model, {0: 3.0})


def weights_of(*names: str) -> nn.ParameterDict:
    return nn.ParameterDict({name: torch.randn(6, 6, dtype=torch.float64) for name in names})


TWO_STACKS = """
layout = "linear"
heads = 2
[[stacks]]
stack = "one"
tensors = { Q = "one_Q", K = "one_K" }
[[stacks]]
stack = "two"
tensors = { Q = "two_Q", K = "two_K" }
"""


def test_two_stacks_are_told_apart(tmp_path):
    (tmp_path / "map.toml").write_text(TWO_STACKS)
    mapping, model = read_mapping(tmp_path / "map.toml"), weights_of("one_Q", "one_K", "two_Q", "two_K")
    with pytest.raises(CallError, match="qk names 0, which may be any of one layer 0 and two layer 0: write"):
        CircuitRates(sgd(model), model, {0: 3.0}, mapping=mapping)
    with pytest.raises(
        CallError, match="qk is a tensor, but the model has several stacks, one layer 0 and two layer 0"
    ):
        CircuitRates(sgd(model), model, torch.ones(2), mapping=mapping)
    rates = CircuitRates(sgd(model), model, {("two", 0): 3.0}, mapping=mapping)
    assert rates.describe().startswith("QK: 3 times the base rate in two layer 0, 72 entries in two_Q, two_K\n")


@pytest.mark.parametrize("ov", [2.0, torch.ones(1), {0: 1.0}])
def test_a_circuit_of_which_there_are_no_weights_has_no_rate(ov):
    model = weights_of("Q", "K")
    mapping = parse_mapping({"tensors": {"Q": "Q", "K": "K"}, "layout": "linear", "heads": 2}, "a mapping")
    with pytest.raises(
        CallError, match="the model has no weights of the OV circuit, so ov has no effect: leave it out"
    ):
        CircuitRates(sgd(model), model, 3.0, ov, mapping=mapping)
    rates = CircuitRates(sgd(model), model, 3.0, mapping=mapping)
    assert rates.describe() == "QK: 3 times the base rate, 72 entries in Q, K\nrest: the base rate"
