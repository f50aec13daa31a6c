"""A watched model, and every copy that is made of it meanwhile, is as if nobody had watched."""

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import load_model
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

IDS = torch.arange(6)[None] + 3


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def encoder(norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()


def attention() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 4, batch_first=True).eval()


VECTORS = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
#: Models from each kind of source, and a call of each.
WATCHED: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "transformers": (llama, lambda model: model(IDS).logits),
    "torch encoder": (encoder, lambda model: model(VECTORS)),
    "torch attention": (attention, lambda model: model(VECTORS, VECTORS, VECTORS)[0]),
}


def through_file(save: Callable[[Any, Any], None], load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def copied(model: Any) -> Any:
        file = io.BytesIO()
        save(model, file)
        file.seek(0)
        return load(file)

    return copied


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_file(pickle.dump, pickle.load),
    "torch.save": through_file(torch.save, lambda file: torch.load(file, weights_only=False)),
    "average": lambda model: AveragedModel(model).module,
    "deepcopy of a list": lambda model: copy.deepcopy([model, model])[1],
}


def trace(model: nn.Module) -> list[Any]:
    """Whatever of a model's modules is neither a parameter nor a buffer nor a part."""
    return [
        {key: value for key, value in vars(module).items() if key.endswith("_hooks") or key == "forward"}
        for module in model.modules()
    ]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", WATCHED)
def test_a_copy_runs_its_own_weights_unwatched(kind, how):
    build, call = WATCHED[kind]
    model = build()
    before, state = trace(model), list(model.state_dict())
    with torch.no_grad():
        plain = call(model)
        with AttentionProbe(model) as probe:
            assert trace(model) == before
            assert list(model.state_dict()) == state
            twin = COPIES[how](model)
            assert torch.equal(call(model), plain)
            queries = probe.table()["queries"].tolist()
            for parameter in twin.parameters():
                parameter.zero_()
            assert not call(twin).any()
        assert probe.table()["queries"].tolist() == queries
        assert not call(twin).any()
        assert torch.equal(call(model), plain)
    assert trace(twin) == trace(model) == before
    assert twin.__dict__.keys() == model.__dict__.keys()
    assert probe._strays == 0
    with AttentionProbe(twin) as of_twin, torch.no_grad():
        call(twin)
        call(model)
    assert of_twin.table()["queries"].tolist() == queries


def test_a_copy_made_by_a_hook_in_the_middle_of_a_call_is_plain():
    model, twins = llama(), []
    for part in (model.model.layers[0], model.model.layers[0].self_attn):
        part.register_forward_hook(lambda *_given: twins.append(copy.deepcopy(model)))
    with torch.no_grad(), AttentionProbe(model):
        model(IDS)
    assert len(twins) == 2
    for twin in list(twins):
        assert [len(hooks["_forward_hooks"]) for hooks in trace(twin)] == [
            len(hooks["_forward_hooks"]) for hooks in trace(model)
        ]
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            assert not twin(IDS).logits.any()


def test_an_average_kept_while_training_follows_the_weights():
    model = llama()
    with AttentionProbe(model):
        average = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        average.update_parameters(model)
        average.update_parameters(model)
    with torch.no_grad():
        other = llama()
        other.load_state_dict(average.module.state_dict())
        assert torch.equal(average(IDS).logits, other(IDS).logits)
        with AttentionProbe(average) as probe:
            average(IDS, torch.tensor([[1, 1, 1, 1, 0, 0]]))
    assert set(probe.table()["queries"]) == {4}


def test_the_copy_of_a_model_with_a_forward_of_its_own_has_a_copy_of_that_forward():
    model = llama()
    model.old_forward = model.forward
    # As accelerate sets it.
    model.forward = functools.partial(type(model).forward, model)
    own = model.forward
    with torch.no_grad(), AttentionProbe(model) as probe:
        twins = [copied(model) for name, copied in COPIES.items() if name != "average"]
        assert torch.equal(model(IDS).logits, twins[0](IDS).logits)
    assert model.forward is own
    assert set(probe.table()["queries"]) == {6}
    for twin in list(twins):
        assert type(twin.forward) is functools.partial
        assert twin.forward.args == (twin,)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            assert not twin(IDS).logits.any()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_probes_end_in_either_order_and_the_classes_are_as_before(first_to_end):
    model, other = llama(), llama()
    kinds = {type(module) for module in model.modules()}
    own = {kind: (kind.__dict__.get("forward"), kind.__dict__.get("__call__")) for kind in kinds}
    probes = [AttentionProbe(model), AttentionProbe(model), AttentionProbe(other)]
    for probe in probes:
        probe.__enter__()
    model(IDS)
    probes[first_to_end].__exit__(None, None, None)
    model(IDS)
    other(IDS)
    probes[1 - first_to_end].__exit__(None, None, None)
    model(IDS)
    probes[2].__exit__(None, None, None)
    assert set(probes[first_to_end].table()["queries"]) == {6}
    assert set(probes[1 - first_to_end].table()["queries"]) == {12}
    assert set(probes[2].table()["queries"]) == {6}
    assert own == {kind: (kind.__dict__.get("forward"), kind.__dict__.get("__call__")) for kind in kinds}


def test_an_abandoned_generator_and_another_thread_s_model_leave_nothing():
    model, other = llama(), llama()
    probe = AttentionProbe(model)

    def outputs() -> Generator[Any, None, None]:
        with probe:
            while True:
                yield model(IDS)

    generator, seen = outputs(), []
    next(generator)
    thread = threading.Thread(target=lambda: seen.append(other(IDS).logits))
    thread.start()
    thread.join()
    generator.close()
    model(IDS)
    assert torch.equal(seen[0], other(IDS).logits)
    assert set(probe.table()["queries"]) == {6}
    assert "__call__" not in type(model.model.layers[0].self_attn).__dict__


def test_a_call_with_other_weights_is_measured_with_those():
    model = llama()
    weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad(), AttentionProbe(model, measures=["largest"]) as probe:
        torch.func.functional_call(model, weights, (IDS,))
    # Without scores every token sees those up to it alike: the mean of 1, 1/2, ..., 1/6.
    assert probe.table()["largest"].tolist() == pytest.approx([(1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6) / 6] * 8)


def test_a_parametrised_model_is_watched_and_its_copy_is_not():
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model = llama()
    parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", Doubled())
    with torch.no_grad(), AttentionProbe(model) as probe:
        twin = copy.deepcopy(model)
        model(IDS)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(IDS).logits.any()
    assert set(probe.table()["queries"]) == {6}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both", "left padding"])
def test_torch_s_fused_path_computes_the_same_to_the_bit_and_its_maps_are_those_of_the_plain_path(norm_first, masks):
    model = encoder(norm_first)
    padding = torch.arange(6) >= torch.tensor([6, 4])[:, None]
    if masks == "left padding":
        padding = padding.flip(1)
    given: dict[str, Any] = {}
    if masks in ("padding", "left padding", "both"):
        given["src_key_padding_mask"] = padding
    if masks in ("causal", "both"):
        given["mask"] = torch.ones(6, 6).triu(1).bool()
    real = ~padding if "src_key_padding_mask" in given else torch.ones_like(padding)
    with torch.no_grad():
        plain = model(VECTORS, **given)
        with AttentionProbe(model, maps="all") as probe:
            probed = model(VECTORS, **given)
    assert torch.equal(plain, probed)
    assert set(probe.table()["queries"]) == {int(real.sum())}
    # A weight that needs a gradient keeps torch on the plain path, where the modules of attention are called.
    with AttentionProbe(model, maps="all") as other:
        model(VECTORS, **given)
    for key, kept in probe.maps.items():
        torch.testing.assert_close(kept[0][real], other.maps[key][0][real], rtol=1e-4, atol=1e-5)
    for name in ("entropy", "largest", "sink", "self", "previous", "next"):
        assert probe.table()[name].tolist() == pytest.approx(other.table()[name].tolist(), abs=1e-5)


def test_one_fused_layer_alone_and_one_of_a_class_of_the_user_are_measured():
    class Scaled(nn.TransformerEncoderLayer):
        def forward(self, src: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
            return super().forward(src * 2, *others, **options)

    for build, factor in ((nn.TransformerEncoderLayer, 1), (Scaled, 2)):
        torch.manual_seed(0)
        layer: Any = build(16, 4, 32, batch_first=True).eval()
        with torch.no_grad():
            plain = layer(VECTORS)
            with AttentionProbe(layer, maps="all") as probe:
                assert torch.equal(layer(VECTORS), plain)
            given = VECTORS * factor
            _, wanted = layer.self_attn(given, given, given, average_attn_weights=False)
        for key, kept in probe.maps.items():
            torch.testing.assert_close(kept[0], wanted[:, key[-1]], rtol=0, atol=1e-6)


def compiled_layer(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


def layer_compiled_in_place(model: Any) -> None:
    model.model.layers[1].compile(backend="eager")


def compiled_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_forward_of_a_layer(model: Any) -> None:
    part = model.model.layers[1].self_attn
    part.forward = torch.compile(part.forward, backend="eager")


@pytest.mark.parametrize(
    ("compiles", "part"),
    [
        (compiled_layer, "the model's part model.layers.1 is"),
        (layer_compiled_in_place, "the model's part model.layers.1 is"),
        (compiled_forward, "the model is"),
        (compiled_forward_of_a_layer, "the model's part model.layers.1.self_attn is"),
    ],
)
def test_what_is_compiled_is_refused_by_its_name(compiles, part):
    model = llama()
    compiles(model)
    for refuses in (AttentionProbe, load_model):
        with pytest.raises(CallError, match=f"{part} compiled, and compiled code bypasses"):
            refuses(model)


@pytest.mark.filterwarnings("ignore")
def test_a_twin_compiled_while_the_model_is_watched_is_right_inside_and_after():
    model = llama()
    with torch.no_grad(), AttentionProbe(model) as probe:
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        wanted = twin(IDS).logits
        compiled: Any = torch.compile(twin, backend="eager")
        torch.testing.assert_close(compiled(IDS).logits, wanted)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, wanted)
    with pytest.raises(CallError, match="nothing was measured"):
        probe.table()


@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_while_it_is_watched_runs_as_it_is_and_is_measured():
    for compiles in (compiled_layer, layer_compiled_in_place, compiled_forward_of_a_layer):
        model = llama()
        with torch.no_grad():
            wanted = model(IDS).logits
            with AttentionProbe(model) as probe:
                compiles(model)
                assert torch.equal(model(IDS).logits, wanted)
        assert set(probe.table()["queries"]) == {6}
    model = llama()
    with torch.no_grad(), AttentionProbe(model) as probe:
        whole: Any = torch.compile(model, backend="eager")
        assert torch.equal(whole(IDS).logits, model(IDS).logits)
    assert set(probe.table()["queries"]) == {12}


def test_a_call_that_maps_over_examples_is_refused():
    model = llama()
    with AttentionProbe(model), pytest.raises(CallError, match=r"called inside torch\.func\.vmap"):
        torch.func.vmap(lambda ids: model(input_ids=ids).logits)(IDS[None])
