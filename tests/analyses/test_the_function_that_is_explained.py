"""What is explained is the user's own function: as the model computes it, under the names that it gives."""

import json
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import explain, load_model, predictions
from qkov.analyses.attention.explanation.settings import ExplanationSettings
from qkov.analyses.attention.models.task_fitting import fit_task
from qkov.analyses.attention.models.tokenisers import load_tokeniser
from qkov.analyses.tasks import Example, Task
from qkov.analyses.tasks.eraser import eraser
from qkov.circuits import CallError, QkovError
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from .tiny_models import small

IDS = torch.arange(6)[None] + 10


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = small("LlamaConfig", num_key_value_heads=2, pad_token_id=0, **options)
    return transformers.LlamaForCausalLM(config).eval()


def esm() -> Any:
    torch.manual_seed(0)
    options = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4, "pad_token_id": 0}
    return transformers.EsmForSequenceClassification(small("EsmConfig", **options, num_labels=3)).eval()


def register(name: str, *, weights: bool) -> None:
    def warm(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **options: Any) -> Any:
        output, maps = eager_attention_forward(module, query, key, value, mask, scaling=scaling * 50, **options)
        return output, maps if weights else None

    transformers.AttentionInterface.register(name, warm)
    transformers.AttentionMaskInterface.register(name, eager_mask)


def test_an_attention_function_of_the_user_that_returns_weights_is_used_as_it_is():
    register("warm", weights=True)
    model = llama()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    model.set_attn_implementation("warm")
    with torch.no_grad():
        own = model(IDS).logits[0, -1].double().log_softmax(-1)
    adapted = load_model(model)
    got = predictions(adapted, [Example(tuple(IDS[0].tolist()))])[0]
    torch.testing.assert_close(got, own, rtol=0, atol=1e-5)
    assert model.config._attn_implementation == "warm"
    maps: list[torch.Tensor] = []
    with torch.no_grad():
        adapted.logits(IDS, torch.ones_like(IDS).bool(), maps=lambda _layer, attention: maps.append(attention))
        wanted = model(IDS, output_attentions=True).attentions
    for one, other in zip(maps, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_attention_function_of_the_user_without_weights_is_refused():
    register("cold", weights=False)
    model = llama()
    model.set_attn_implementation("cold")
    with pytest.raises(CallError, match="gave no attention map"):
        load_model(model)
    assert model.config._attn_implementation == "cold"


def test_a_function_that_replaces_a_fused_one_is_noticed():
    register("sdpa_of_the_user", weights=False)
    model = llama()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    # As if the user had registered a function in place of sdpa.
    model.config._attn_implementation = "sdpa_of_the_user"
    with pytest.raises(CallError, match=r"as qkov runs it by ids, differ from its own by [\d.e+-]+"):
        load_model(model)
    assert model.config._attn_implementation == "sdpa_of_the_user"


def test_embeddings_that_are_scaled_for_ids_only_are_those_of_the_explained_function():
    model = esm()
    adapted, shown = load_model(model), torch.ones_like(IDS).bool()
    with torch.no_grad():
        own = model(IDS).logits
        torch.testing.assert_close(adapted.logits(IDS, shown), own, rtol=1e-5, atol=1e-6)
        embedded = adapted.embed(IDS)
        torch.testing.assert_close(adapted.logits(IDS, shown, embedded=embedded), own, rtol=1e-5, atol=1e-6)
    model.double()
    embedded = adapted.embed(IDS)
    # The derivative along a direction is that of the model with the direction added to its table.
    direction = torch.zeros_like(embedded)
    direction[0, 2] = torch.randn(48, generator=torch.Generator().manual_seed(0))
    embedded = embedded.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(adapted.logits(IDS, shown, embedded=embedded)[0, 1], embedded)
    table, step, values = model.get_input_embeddings().weight, 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            table[IDS[0, 2]] += sign * step * direction[0, 2]
            values.append(float(model(IDS).logits[0, 1]))
            table[IDS[0, 2]] -= sign * step * direction[0, 2]
    assert float((gradient * direction).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)


class ScaledForIds(transformers.BertForSequenceClassification):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        output: Any = super().forward(*inputs, **options)
        calls = self.__dict__.setdefault("calls", [])
        calls.append(1)
        output.logits = output.logits * len(calls)
        return output


def test_a_model_that_computes_something_else_at_each_call_is_refused_with_the_difference():
    torch.manual_seed(0)
    model: Any = ScaledForIds(small("BertConfig", num_labels=3)).eval()
    with pytest.raises(CallError, match=r"differ from its own by [\d.]+, with logits up to") as caught:
        load_model(model, "classifier")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_attention_stay_after_success_and_after_an_error(training):
    model = llama().train(training)
    model.model.layers[0].mlp.train(not training)
    model.set_attn_implementation("sdpa")
    modes = [module.training for module in model.modules()]
    adapted = load_model(model)
    predictions(adapted, [Example(tuple(IDS[0].tolist()))])
    expected = "evaluation, without dropout, although the model itself is in training mode"
    assert adapted.mode == expected
    model.model.layers[1].self_attn.forward = None
    with pytest.raises(TypeError):
        adapted.logits(IDS, torch.ones_like(IDS).bool())
    with pytest.raises(CallError, match="could not be run on a short sequence"):
        load_model(model)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"


def classifier(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(small("BertConfig", **options)).eval()


def numbered(classes: tuple[str, ...] = ()) -> Task:
    examples = [Example(tuple(range(10 + k, 16 + k)), label=k % 2) for k in range(4)]
    return Task(name="numbers", examples=tuple(examples), relevant="none", classes=classes)


SETTINGS = ExplanationSettings(methods=("rollout",), draws=1)


def test_classes_have_the_names_of_the_config():
    model = load_model(classifier(id2label={0: "plain", 1: "noble"}, label2id={"plain": 0, "noble": 1}))
    explanation = explain(model, numbered(), SETTINGS)
    assert explanation.examples["right_answer"].tolist() == ["plain", "noble"] * 2
    assert set(explanation.examples["answer"]) <= {"plain", "noble"}
    assert explanation.description["task"]["classes"] == ["plain", "noble"]
    assert explanation.description["model"]["mode"] == "evaluation, without dropout"


def test_labels_are_matched_by_name_where_model_and_task_name_the_same_classes():
    model = load_model(classifier(id2label={0: "plain", 1: "noble"}, label2id={"plain": 0, "noble": 1}))
    task = fit_task(numbered(("noble", "plain")), model)
    assert task.classes == ("plain", "noble")
    assert [example.label for example in task.examples] == [1, 0, 1, 0]
    unknown = fit_task(numbered(("yes", "no")), model)
    assert unknown.classes == ("yes", "no")
    assert [example.label for example in unknown.examples] == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", ["BertConfig", "LlamaConfig", "GPT2Config"])
def test_a_folder_without_a_tokenizer_is_refused_by_its_name(tmp_path, kind):
    small(kind).save_pretrained(tmp_path)
    with pytest.raises(QkovError, match=f"{tmp_path.name}.*") as caught:
        load_tokeniser(tmp_path)
    assert "tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_reads_no_token_ids_is_refused_by_that_reason():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model: Any = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))
    for kind in ("classifier", None):
        with pytest.raises(CallError, match="reads pixel_values, not token ids"):
            load_model(model, kind)


def ibert() -> Any:
    return transformers.IBertForSequenceClassification(small("IBertConfig", quant_mode=False))


def canine() -> Any:
    return transformers.CanineForSequenceClassification(
        small("CanineConfig", num_hash_functions=2, num_hash_buckets=32)
    )


def nystromformer() -> Any:
    config = small("NystromformerConfig", num_landmarks=2, segment_means_seq_len=8)
    return transformers.NystromformerForSequenceClassification(config)


@pytest.mark.parametrize("build", [ibert, canine, nystromformer])
def test_architectures_that_cannot_be_run_this_way_are_refused_in_one_line(build):
    torch.manual_seed(0)
    model = build().train()
    with pytest.raises(CallError) as caught:
        load_model(model)
    assert "\n" not in str(caught.value)
    assert type(model).__name__ in str(caught.value)
    assert model.training


def layout(folder: Any, document: str, evidence: dict[str, Any]) -> Any:
    (folder / "docs").mkdir()
    (folder / "docs" / "one").write_text(document, encoding="utf-8", newline="")
    row = {"annotation_id": "one", "classification": "POS", "evidences": [[{"docid": "one", **evidence}]]}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n\n"])
@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\t", "\u0085"])
def test_evidence_is_counted_in_what_the_space_character_separates(tmp_path, end, space):
    document = f"10{space}mg was given .{end}the rash went away ."
    evidence = {"start_token": 5, "end_token": 7, "text": "rash went"}
    task = eraser(layout(tmp_path, document, evidence), "test")
    (example,) = task.examples
    relevant: Any = example.relevant
    (spans,) = relevant
    assert [example.text[start:end] for start, end in spans] == ["rash", "went"]


def test_evidence_with_another_text_is_left_out_and_counted(tmp_path):
    evidence = {"start_token": 0, "end_token": 2, "text": "rash went"}
    folder = layout(tmp_path, "the rash went away .", evidence)
    row = json.loads((folder / "test.jsonl").read_text())
    right = row | {"annotation_id": "two", "evidences": [[{"docid": "one", "start_token": 1, "end_token": 3}]]}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(right) + "\n")
    task = eraser(folder, "test")
    assert [example.id for example in task.examples] == ["two"]
    assert task.left_out == (("whose evidence has another text than its document at that place", 1),)
