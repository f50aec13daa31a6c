"""Models with adapters of PEFT: read as they compute, against PEFT's merged weights, dense algebra and the forward."""

import copy
from typing import Any

import peft
import pytest
import torch
from qkov.analyses.trajectories import compare_models
from qkov.circuits import QkovError, measure_change, open_model
from qkov.circuits.live.adapters import adapted_names
from qkov.circuits.live.parameters import LiveParameters
from torch import nn

from .adapted_models import NOT_OURS, adapted, changed, gpt2, llama

pytestmark = pytest.mark.filterwarnings(*NOT_OURS)

WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
NAMES = (*WEIGHTS, "b_Q", "b_K", "b_V", "b_O")


def tensors_of(source: Any) -> list[dict[str, torch.Tensor]]:
    return [
        {name: tensor for name in NAMES if (tensor := getattr(weights, name)) is not None}
        for weights in source.layers()
    ]


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-14) -> None:
    for one, other in zip(tensors_of(found), tensors_of(wanted), strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name].double(), rtol=tolerance, atol=tolerance, msg=name)


def changed_weights(model: Any) -> set[str]:
    pairs = zip(tensors_of(open_model(model)), tensors_of(open_model(model, adapters=False)), strict=True)
    return {name for one, other in pairs for name, tensor in one.items() if not torch.equal(tensor, other[name])}


#: A config of PEFT, and the weights that it changes.
CASES: dict[str, tuple[Any, Any, set[str]]] = {
    "ranks and scales of their own": (
        llama,
        peft.LoraConfig(
            r=3,
            lora_alpha=7,
            target_modules=["q_proj", "k_proj", "o_proj"],
            rank_pattern={"k_proj": 2},
            alpha_pattern={"o_proj": 1},
        ),
        {"W_Q", "W_K", "W_O"},
    ),
    "rank-stabilised, with biases": (
        llama,
        peft.LoraConfig(r=4, lora_alpha=7, use_rslora=True, target_modules=["q_proj", "v_proj"], bias="lora_only"),
        {"W_Q", "W_V"},
    ),
    "biases of adapters": (
        llama,
        peft.LoraConfig(r=2, lora_bias=True, target_modules=["v_proj"]),
        {"W_V", "b_V"},
    ),
    "fused": (gpt2, peft.LoraConfig(r=3, fan_in_fan_out=True, target_modules=["c_attn"]), {"W_Q", "W_K", "W_V"}),
    "DoRA": (llama, peft.LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "v_proj"]), {"W_Q", "W_V"}),
    "DoRA, fused": (
        gpt2,
        peft.LoraConfig(r=3, use_dora=True, fan_in_fan_out=True, target_modules=["c_attn"]),
        {"W_Q", "W_K", "W_V"},
    ),
    "parameters": (llama, peft.LoraConfig(r=3, target_modules=[], target_parameters=["q_proj.weight"]), {"W_Q"}),
    "trained copies": (
        llama,
        peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["k_proj"]),
        {"W_Q", "W_K", "b_K"},
    ),
    "tokens": (llama, peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 2]), {"W_Q"}),
    "IA3": (
        llama,
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        {"W_K", "W_V", "b_K", "b_V"},
    ),
    "LoHa": (llama, peft.LoHaConfig(r=3, target_modules=["q_proj"]), {"W_Q"}),
    "OFT": (llama, peft.OFTConfig(r=0, oft_block_size=4, target_modules=["v_proj"]), {"W_V"}),
    "VeRA": (llama, peft.VeraConfig(r=3, target_modules=["q_proj", "o_proj"]), {"W_Q", "W_O"}),
    "elsewhere": (llama, peft.LoraConfig(r=3, target_modules=["up_proj"]), set()),
    "norms": (llama, peft.LNTuningConfig(target_modules=["input_layernorm"]), set()),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_peft_merges_and_the_model_is_left_as_it_is(case):
    make, config, expected = CASES[case]
    base = make()
    before = copy.deepcopy(base)
    model = adapted(base, config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    opened = open_model(model)
    assert_close(opened, open_model(copy.deepcopy(model).merge_and_unload()))
    assert changed_weights(model) == expected
    if config.peft_type != peft.PeftType.LORA or config.bias == "none":
        for one, other in zip(
            tensors_of(open_model(model, adapters=False)), tensors_of(open_model(before)), strict=True
        ):
            assert all(torch.equal(one[name], other[name]) for name in NAMES if name in other)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert opened.recognised == open_model(before).recognised


def test_an_adapted_weight_is_the_base_and_s_b_a_in_float64_whatever_the_types():
    model = adapted(
        llama(torch.bfloat16), peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], lora_dropout=0.5), None
    )
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.lora_A["default"].to(torch.float32)
    A, B = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
    W = layer.base_layer.weight.detach().double() + 5 / 3 * B @ A
    W_Q = list(open_model(model).layers())[1].W_Q
    assert W_Q.dtype == torch.float64
    torch.testing.assert_close(W_Q, W.unflatten(0, (W_Q.shape[0], -1)).mT, rtol=1e-14, atol=1e-16)
    # Weights that nothing changes keep their type and share the model's memory.
    W_K = list(open_model(model).layers())[1].W_K
    assert W_K.dtype == torch.bfloat16
    assert (
        W_K.untyped_storage().data_ptr()
        == model.base_model.model.model.layers[1].self_attn.k_proj.weight.untyped_storage().data_ptr()
    )


def test_norms_of_adapters_are_those_in_front_of_attention():
    model = adapted(llama(), peft.LNTuningConfig(target_modules=["input_layernorm"]))
    norms = [weights.norm.gain for weights in open_model(model).layers()]
    tuned = [layer.input_layernorm.ln_tuning_layers["default"].weight for layer in model.base_model.model.model.layers]
    for norm, gain in zip(norms, tuned, strict=True):
        assert torch.equal(norm, gain.detach().double())


def two_adapters() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = adapted(llama(), config)
    model.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=1, target_modules=["q_proj", "v_proj"]))
    model.double().base_model.set_adapter("other")
    changed(model, 2)
    return model


def query(model: Any, **options: Any) -> torch.Tensor:
    return next(open_model(model, **options).layers()).W_Q.to(torch.float64, copy=True)


def test_several_adapters_add_up_and_those_that_are_off_do_not_count():
    model = two_adapters()
    of_one, off = query(model), query(model, adapters=False)
    model.base_model.set_adapter("default")
    of_other = query(model)
    model.base_model.set_adapter(["default", "other"])
    torch.testing.assert_close(query(model) - off, of_one + of_other - 2 * off, rtol=1e-13, atol=1e-15)
    assert float((of_one - off).norm()) > 0.01
    with model.disable_adapter():
        assert torch.equal(query(model), off)
    assert not torch.equal(query(model), off)


def test_adapters_that_are_merged_are_taken_out_for_the_base():
    model = two_adapters()
    now, off = query(model), query(model, adapters=False)
    model.merge_adapter()
    torch.testing.assert_close(query(model), now, rtol=0, atol=1e-15)
    torch.testing.assert_close(query(model, adapters=False), off, rtol=0, atol=1e-15)
    for module in model.modules():
        if hasattr(module, "_disable_adapters"):
            module._disable_adapters = True
    torch.testing.assert_close(query(model), off, rtol=0, atol=1e-15)
    # IA3 multiplies, and dividing by it again is not exact.
    model = adapted(llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    merged = copy.deepcopy(model).merge_and_unload()
    model.merge_adapter()
    assert_close(open_model(model), open_model(merged))
    with pytest.raises(
        QkovError, match=r"layers\.0\.self_attn\.k_proj has adapters of the type ia3 .*call unmerge_adapter\(\)$"
    ):
        next(open_model(model, adapters=False).layers())


class Attention(nn.Module):
    """Attention of torch, whose projections PEFT adapts together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.readout = nn.Linear(8, 3)

    def forward(self, x):
        return self.readout(self.attention(x, x, x, need_weights=False)[0])


def test_attention_modules_of_torch_are_read_with_their_adapters():
    model = adapted(Attention().double(), peft.LoraConfig(r=2, target_modules=["attention"]))
    part = model.base_model.model.attention
    A, B = part.lora_A["default"].weight.detach(), part.lora_B["default"].weight.detach()
    scale = part.scaling["default"]
    whole = part.base_layer.in_proj_weight.detach() + scale * B @ A
    weights = next(open_model(model).layers())
    found = torch.cat([getattr(weights, name).mT.flatten(0, 1) for name in ("W_Q", "W_K", "W_V")])
    torch.testing.assert_close(found, whole, rtol=1e-14, atol=1e-15)
    merged = copy.deepcopy(model).merge_and_unload()
    assert_close(open_model(model), open_model(merged))
    assert changed_weights(model) == set(WEIGHTS)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), merged(x), rtol=1e-12, atol=1e-12)
    output: Any = LiveParameters(model).tensors()["base_model.model.attention.out_proj.weight"]
    names = [name.removeprefix("base_model.model.attention.base_layer.out_proj.") for name, _ in output.parts]
    assert {"lora_A.default.weight", "lora_B.default.weight", "base_layer.weight"} <= set(names)


def test_what_layers_compute_is_compared_with_what_peft_merges():
    class Scaled(peft.tuners.lora.Linear):
        by = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.by * super().forward(x)

    model = adapted(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.__class__ = Scaled
    expected = r"q_proj has adapters of the type .*\(Scaled\), whose weights cannot be read: what the layer computes is"
    with pytest.raises(QkovError, match=expected):
        next(open_model(model).layers())
    layer.by = 1 + 1e-4
    with pytest.raises(QkovError, match=expected):
        next(open_model(model).layers())
    # As rounding in float32 inside some kinds of adapters.
    layer.by = 1 + 1e-8
    assert next(open_model(model).layers()).heads == 4
    layer.__class__ = peft.tuners.lora.Linear
    assert next(open_model(model).layers()).heads == 4
    layer.forward = nn.Identity().forward
    with pytest.raises(QkovError, match="the forward function of its Linear was replaced"):
        next(open_model(model).layers())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            peft.PolyConfig(r=2, n_tasks=2, target_modules=["q_proj"]),
            r"q_proj has adapters of the type poly \(Linear\)",
        ),
        (
            peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"),
            "has adapters of the type adaption_prompt, which take the place of its attention",
        ),
        (
            peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
            r"q_proj has adapters of the type lora \(Linear\), whose weights cannot be read",
        ),
    ],
    ids=["poly", "adaption prompt", "aLoRA"],
)
def test_adapters_that_are_not_weights_are_refused_by_their_type(config, expected):
    with pytest.raises(QkovError, match=expected) as caught:
        next(open_model(adapted(llama(), config)).layers())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", [peft.PrefixTuningConfig, peft.PromptTuningConfig])
def test_methods_that_change_no_weight_leave_the_weights(method):
    base = llama()
    model = adapted(base, method(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert_close(open_model(model), open_model(base), 0.0)


def test_wrapped_and_plain_models_with_adapters_are_read_alike():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    base = llama()
    model = adapted(base, config)
    for other in (base, nn.Sequential(model), torch.compile(model, backend="eager")):
        assert_close(open_model(other), open_model(model), 0.0)
    assert adapted_names(base) == {
        f"model.layers.{layer}.self_attn.q_proj.{part}" for layer in (0, 1) for part in ("weight", "bias")
    }
    assert adapted_names(llama()) == adapted_names(3) == frozenset()


def test_parameters_are_not_read_from_weights_that_adapters_make():
    model = adapted(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    parameters = LiveParameters(model)
    expected = r"layers\.0\.self_attn\.q_proj\.weight is made with adapters \(lora\) and is not a parameter itself"
    with pytest.raises(QkovError, match=expected):
        next(parameters.read(lambda parameter: parameter).layers())
    read = parameters.read(lambda parameter: parameter, lambda weight: weight)
    assert torch.equal(next(read.layers()).W_Q, query(model))
    elsewhere = LiveParameters(adapted(llama(), peft.LoraConfig(r=2, target_modules=["up_proj"])))
    assert next(elsewhere.read(lambda parameter: parameter).layers()).heads == 4


def test_the_change_of_a_circuit_is_that_of_dense_products():
    model = adapted(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    table = compare_models(open_model(model, adapters=False), model).table
    layers = zip(open_model(model).layers(), open_model(model, adapters=False).layers(), strict=True)
    for weights, base in layers:
        values = measure_change(weights.qk(), base.qk())
        dense = weights.qk().dense() - base.qk().dense()
        for head, matrix in enumerate(dense):
            s = torch.linalg.svdvals(matrix)
            assert values["rank"][head] == 4 == torch.linalg.matrix_rank(matrix, rtol=1e-12)
            torch.testing.assert_close(values["singular_values"][head][:4], s[:4], rtol=1e-10, atol=0)
            row = table.query(f"layer == {weights.layer} and head == {head} and circuit == 'QK'").iloc[0]
            for name in ("change_norm", "relative_change"):
                assert float(values[name][head]) == pytest.approx(row[name], rel=1e-9)
            for name in ("stable_rank", "effective_rank"):
                assert float(values[name][head]) == pytest.approx(row[f"change_{name}"], rel=1e-8)
