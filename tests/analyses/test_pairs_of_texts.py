"""Pairs of texts reach a model as the user's own tokenizer and model take them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.attention import (
    Batch,
    ExplanationSettings,
    Perturbation,
    attribute,
    explain,
    faithfulness,
    fit_task,
    load_model,
    predictions,
)
from qkov.analyses.attention.measures.gradient_rollout import weighted_maps
from qkov.analyses.tasks import Example, Task, TextExample, encode
from qkov.circuits import CallError
from torch import nn

from .pairs import WORDS, bert_tokenizer, classifier_of_pairs, jolted
from .tiny_models import gpt2, small

PAIRS = (
    TextExample("who was grey ?", 1, pair="the cats sat on the mat . the dog was grey .", pair_relevant=(((37, 41),),)),
    TextExample("the cat", 0, ((((4, 7)),),), pair="a dog is not a cat ."),
    TextExample("who sat on the mat ?", 1, (((0, 3),),), pair="cats", pair_relevant=(((0, 4),),)),
    TextExample("the dog was true .", 0, (((12, 16),),)),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return bert_tokenizer(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def model():
    return classifier_of_pairs()


def own_inputs(tokenizer: Any, example: TextExample) -> Any:
    return tokenizer(example.text, example.pair, return_tensors="pt")


def own_logits(model: Any, tokenizer: Any, example: TextExample) -> torch.Tensor:
    with torch.no_grad():
        return model(**own_inputs(tokenizer, example)).logits[0].double()


def test_a_classifier_of_pairs_answers_as_in_the_users_own_call(model, tokenizer):
    adapted = load_model(model)
    encoded = encode(PAIRS, tokenizer)
    batch = Batch.of(encoded, adapted.pad)
    with torch.no_grad():
        logits = adapted.logits(batch.tokens, batch.mask, token_types=batch.token_types)
        vectors = adapted.embed(batch.tokens)
        by_vectors = adapted.logits(batch.tokens, batch.mask, token_types=batch.token_types, embedded=vectors)
    for number, (example, answer) in enumerate(zip(PAIRS, predictions(adapted, encoded), strict=True)):
        own = own_logits(model, tokenizer, example)
        torch.testing.assert_close(logits[number].double(), own, rtol=0, atol=2e-6)
        torch.testing.assert_close(by_vectors[number].double(), own, rtol=0, atol=2e-6)
        torch.testing.assert_close(answer, own.log_softmax(-1), rtol=0, atol=2e-6)
    # The token types decide: without them the answers are others.
    bare = [replace(example, token_types=()) for example in encoded]
    without = predictions(adapted, bare)[0]
    assert float((without - predictions(adapted, encoded)[0]).abs().max()) > 1e-2


def test_inputs_that_differ_in_their_token_types_alone_are_run_apart(model):
    adapted = load_model(model)
    one = Example((2, 5, 6, 3, 7, 3), token_types=(0, 0, 0, 0, 1, 1))
    other = replace(one, token_types=(0, 0, 0, 0, 0, 0))
    for answer, example in zip(predictions(adapted, [one, other]), (one, other), strict=True):
        with torch.no_grad():
            own = model(torch.tensor([example.tokens]), token_type_ids=torch.tensor([example.token_types])).logits
        torch.testing.assert_close(answer, own[0].double().log_softmax(-1), rtol=0, atol=2e-6)


def test_rollout_and_attention_on_relevant_tokens_are_those_of_the_users_own_maps(model, tokenizer):
    model.set_attn_implementation("eager")
    task = fit_task(Task("pairs", PAIRS, "marked"), load_model(model), tokenizer)
    explanation = explain(
        load_model(model), task, ExplanationSettings(methods=("rollout",), draws=1), tokeniser=tokenizer
    )
    for number, example in enumerate(PAIRS):
        inputs = own_inputs(tokenizer, example)
        with torch.no_grad():
            maps = model(**inputs, output_attentions=True).attentions
        rollout = np.eye(inputs["input_ids"].shape[1])
        for attention in maps:
            mixed = 0.5 * attention[0].double().numpy().mean(axis=0) + 0.5 * np.eye(len(rollout))
            rollout = mixed @ rollout
        tokens = explanation.tokens[explanation.tokens["example"] == number]
        np.testing.assert_allclose(tokens["rollout"], rollout[0], rtol=0, atol=1e-7)
        # The marked words, found by the tokenizer's own account of which text and character each token is from.
        marked = np.zeros(len(rollout))
        for text, spans in ((0, example.relevant), (1, example.pair_relevant)):
            for start, end in spans[0] if spans else ():
                at = {inputs.char_to_token(0, character, text) for character in range(start, end)}
                marked[[position for position in at if position is not None]] = 1
        assert tokens["relevance"].tolist() == marked.tolist()
        wanted = float(rollout[0] @ marked)
        assert explanation.examples["attention"][number] == pytest.approx(wanted, abs=1e-7)
        types = inputs["token_type_ids"][0].tolist()
        assert tokens["token_type"].tolist() == types
        of_pair = [which == 1 for which in inputs.sequence_ids(0)]
        assert tokens["in_pair"].tolist() == of_pair
    assert explanation.description["task"]["pairs"] == 3
    assert explanation.examples["pair"].isna().tolist() == [False, False, False, True]


def test_attributions_go_through_the_embeddings_with_token_types(model, tokenizer):
    model.set_attn_implementation("eager")
    adapted = load_model(model)
    encoded = encode(PAIRS, tokenizer)
    got = attribute(adapted, encoded, "input x gradient", target="label").rows
    ablated = attribute(adapted, encoded, "ablation", target="label", baseline="zero").rows
    steps = attribute(adapted, encoded, "integrated gradients", target="label", baseline="zero", steps=200)
    for number, example in enumerate(PAIRS):
        inputs = dict(own_inputs(tokenizer, example))
        vectors = model.bert.embeddings.word_embeddings(inputs.pop("input_ids")).detach().requires_grad_()
        chosen = model(inputs_embeds=vectors, **inputs).logits.log_softmax(-1)[0, example.label]
        (gradient,) = torch.autograd.grad(chosen, vectors)
        own, chosen = (gradient * vectors).sum(-1)[0].detach().double(), chosen.detach()
        torch.testing.assert_close(got[number], own, rtol=0, atol=2e-6)
        removable = [not special for special in encoded[number].is_special]
        for position in np.flatnonzero(removable):
            absent = vectors.detach().clone()
            absent[0, position] = 0
            with torch.no_grad():
                other = model(inputs_embeds=absent, **inputs).logits.log_softmax(-1)[0, example.label]
            assert float(ablated[number][position]) == pytest.approx(float(chosen - other), abs=3e-6)
        # Integrated gradients add up to the difference between the input and the baseline.
        baseline = vectors.detach() * ~torch.tensor(removable)[None, :, None]
        with torch.no_grad():
            at_baseline = model(inputs_embeds=baseline, **inputs).logits.log_softmax(-1)[0, example.label]
        assert float(steps.rows[number].sum()) == pytest.approx(float(chosen - at_baseline), abs=2e-3)


def test_gradient_rollout_is_that_of_the_users_own_maps(model, tokenizer):
    model.set_attn_implementation("eager")
    (encoded,) = encode(PAIRS[:1], tokenizer)
    adapted = load_model(model)
    got = weighted_maps(adapted, Batch.of([encoded], 0), "label")
    output = model(**own_inputs(tokenizer, PAIRS[0]), output_attentions=True)
    target = output.logits.log_softmax(-1)[0, 1]
    for mine, attention, gradient in zip(
        got, output.attentions, torch.autograd.grad(target, output.attentions), strict=True
    ):
        own = (attention * gradient).clamp_min(0).mean(dim=1).detach().double()
        torch.testing.assert_close(mine.double(), own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("removal", ["deletion", "mask token", "attention mask"])
def test_tokens_that_are_left_keep_their_types(model, tokenizer, removal):
    adapted = load_model(model, mask_token=WORDS.index("[MASK]"))
    encoded = encode(PAIRS[:1], tokenizer)
    row = torch.arange(len(encoded[0].tokens), dtype=torch.float64)
    settings = Perturbation(cuts=(0.2,), removal=removal)
    result = faithfulness(adapted, encoded, {"later first": [row]}, settings, target="label", draws=0)
    table: Any = result.table.set_index("order").loc["given"]
    inputs = own_inputs(tokenizer, PAIRS[0])
    removable = [position for position, special in enumerate(encoded[0].is_special) if not special]
    gone = removable[-int(np.ceil(0.2 * len(removable))) :]
    assert table["k"] == len(gone)

    def own(removed: list[int]) -> float:
        kept = [position for position in range(len(row)) if position not in removed]
        ids, types = inputs["input_ids"].clone(), inputs["token_type_ids"]
        mask = torch.ones_like(ids)
        if removal == "deletion":
            ids, types, mask = ids[:, kept], types[:, kept], mask[:, kept]
        elif removal == "mask token":
            ids[:, removed] = WORDS.index("[MASK]")
        else:
            mask[:, removed] = 0
        with torch.no_grad():
            return float(model(ids, token_type_ids=types, attention_mask=mask).logits.softmax(-1)[0, 1])

    whole = own([])
    alone = own([position for position in removable if position not in gone])
    assert float(table["comprehensiveness"]) == pytest.approx(whole - own(gone), abs=1e-6)
    assert float(table["sufficiency"]) == pytest.approx(whole - alone, abs=1e-6)


class TypesCounted(transformers.BertForSequenceClassification):
    """Multiplies its logits by the number of its calls with a second text, so that no two of them agree."""

    def forward(self, *inputs: Any, token_type_ids: Any = None, **options: Any) -> Any:
        output: Any = super().forward(*inputs, token_type_ids=token_type_ids, **options)
        if token_type_ids is not None and bool(token_type_ids.any()):
            calls = self.__dict__.setdefault("calls", [])
            calls.append(1)
            output.logits = output.logits * len(calls)
        return output


def test_a_model_that_differs_with_token_types_alone_is_refused_with_the_difference():
    torch.manual_seed(0)
    counted: Any = TypesCounted(small("BertConfig", num_labels=3)).eval()
    with pytest.raises(
        CallError, match=r"by ids with token types, differ from its own by [\d.]+, with logits"
    ) as caught:
        load_model(counted, "classifier")
    assert "\n" not in str(caught.value)


def test_a_model_that_leaves_token_types_out_with_embeddings_is_refused():
    torch.manual_seed(0)
    deaf: Any = transformers.BertForSequenceClassification(small("BertConfig", num_labels=3)).eval()
    table = deaf.bert.embeddings.token_type_embeddings
    jolted(table)
    own_forward = deaf.forward

    def forward(*inputs: Any, token_type_ids: Any = None, **options: Any) -> Any:
        # A hook on the token embedding is how embeddings are put in; this model drops the types then.
        hooked = bool(deaf.get_input_embeddings()._forward_hooks)
        return own_forward(*inputs, token_type_ids=None if hooked else token_type_ids, **options)

    deaf.forward = forward
    with pytest.raises(CallError, match="by embeddings with token types, differ"):
        load_model(deaf, "classifier")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPT2ForSequenceClassification", "XLMForSequenceClassification"])
def test_token_types_that_are_looked_up_in_the_vocabulary_stay_with_replaced_embeddings(name):
    torch.manual_seed(0)
    if name.startswith("GPT2"):
        config = gpt2(pad_token_id=0)
    else:
        sizes: dict[str, Any] = {"emb_dim": 48, "n_layers": 2, "n_heads": 4, "n_words": 50, "pad_index": 0}
        config = transformers.XLMConfig(**sizes)
    model: Any = jolted(getattr(transformers, name)(config))
    adapted = load_model(model)
    # The second row has the types as its tokens.
    ids = torch.tensor([[11, 12, 13, 14, 15, 16], [1, 1, 1, 2, 2, 2]])
    types = torch.tensor([[3, 3, 3, 4, 4, 4], [1, 1, 1, 2, 2, 2]])
    shown = torch.ones_like(ids).bool()
    with torch.no_grad():
        for row in (slice(0, 1), slice(1, 2), slice(0, 2)):
            own = model(ids[row], token_type_ids=types[row]).logits
            given = adapted.logits(ids[row], shown[row], token_types=types[row], embedded=adapted.embed(ids[row]))
            torch.testing.assert_close(given, own, rtol=0, atol=1e-5)


def test_a_module_of_torch_gets_token_types_under_their_usual_name():
    torch.manual_seed(0)

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.types = nn.Embedding(30, 16), nn.Embedding(2, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, tokens: Any, token_type_ids: Any = None, padding_mask: Any = None) -> torch.Tensor:
            vectors = self.words(tokens)
            if token_type_ids is not None:
                vectors = vectors + self.types(token_type_ids)
            return self.head(self.layer(vectors, src_key_padding_mask=padding_mask)[:, 0])

    module = Typed().eval()
    adapted = load_model(module, "classifier")
    examples = [
        Example((1, 2, 3, 4), token_types=(0, 0, 1, 1)),
        Example((1, 2, 3), token_types=(0, 1, 1)),
    ]
    for example, answer in zip(examples, predictions(adapted, examples), strict=True):
        with torch.no_grad():
            own = module(torch.tensor([example.tokens]), token_type_ids=torch.tensor([example.token_types]))
        torch.testing.assert_close(answer, own[0].double().log_softmax(-1), rtol=0, atol=2e-6)


def test_a_model_without_token_types_reads_pairs_by_its_separators(tokenizer):
    config = transformers.DistilBertConfig(dim=48, n_heads=4, n_layers=2, hidden_dim=64, vocab_size=len(WORDS))
    torch.manual_seed(0)
    plain: Any = jolted(transformers.DistilBertForSequenceClassification(config))
    adapted = load_model(plain)
    task = fit_task(Task("pairs", PAIRS, "marked"), adapted, tokenizer)
    assert all(example.token_types == () for example in task.in_tokens)
    for example, answer in zip(PAIRS, predictions(adapted, task.in_tokens), strict=True):
        ids = tokenizer(example.text, example.pair, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            own = plain(ids).logits[0].double().log_softmax(-1)
        torch.testing.assert_close(answer, own, rtol=0, atol=2e-6)


def test_token_types_that_a_model_cannot_take_are_refused_in_one_line(model, tokenizer):
    config = transformers.DistilBertConfig(dim=48, n_heads=4, n_layers=2, hidden_dim=64, vocab_size=len(WORDS))
    plain = load_model(transformers.DistilBertForSequenceClassification(config).eval())
    encoded = encode(PAIRS[:2], tokenizer)
    with pytest.raises(CallError, match=r"example 0 has token types, and DistilBert.* takes none"):
        predictions(plain, encoded)
    ids = torch.tensor([[2, 5, 3]])
    with pytest.raises(CallError, match="takes no token types"):
        plain.logits(ids, ids > 0, token_types=torch.zeros_like(ids))
    adapted = load_model(model)
    for types in ((0, 0, 2), (0, 7, 1)):
        with pytest.raises(CallError, match=f"has 2 token types, from 0, got 0 to {max(types)}"):
            predictions(adapted, [Example((2, 5, 3), token_types=types)])
    one_type = load_model(classifier_of_pairs(type_vocab_size=1))
    with pytest.raises(CallError, match="has 1 token types, from 0, got 0 to 1"):
        predictions(one_type, encoded)


def test_examples_with_and_without_token_types_are_not_put_in_one_batch():
    typed, bare = Example((1, 2), token_types=(0, 1)), Example((1, 2), id="bare")
    with pytest.raises(CallError, match="example bare has no token types, and others of its batch have them"):
        Batch.of([typed, bare], 0)
    assert Batch.of([bare], 0).token_types is None
    types = Batch.of([typed, Example((1, 2, 3), token_types=(0, 1, 1))], 0).token_types
    assert types is not None
    assert types.tolist() == [[0, 1, 0], [0, 1, 1]]


def test_a_masked_language_model_fills_in_behind_the_second_text(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, pad_token_id=0, **sizes)
    masked: Any = jolted(transformers.BertForMaskedLM(config))
    adapted = load_model(masked, mask_token=WORDS.index("[MASK]"))
    example = TextExample("who was grey ?", 0, continuations=(" dog", " cat"), pair="the cat was not . the")
    task = fit_task(Task("fill in", (example,), "none"), adapted, tokenizer)
    (answer,) = predictions(adapted, task.in_tokens)
    inputs = tokenizer("who was grey ?", "the cat was not . the [MASK]", return_tensors="pt")
    at = int((inputs["input_ids"][0] == WORDS.index("[MASK]")).nonzero())
    with torch.no_grad():
        own = masked(**inputs).logits[0, at].double().log_softmax(-1)
    torch.testing.assert_close(answer, own[[WORDS.index("dog"), WORDS.index("cat")]], rtol=0, atol=2e-6)


def test_a_causal_model_continues_the_second_text(tokenizer):
    torch.manual_seed(0)
    causal: Any = jolted(transformers.GPT2LMHeadModel(gpt2(vocab_size=len(WORDS))))
    adapted = load_model(causal)
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    plain._tokenizer.post_processor = None  # no token that is added at the end
    example = TextExample("who was grey ?", 0, continuations=(" the cat", " not a dog"), pair="not the dog .")
    task = fit_task(Task("continue", (example,), "none"), adapted, plain)
    (answer,) = predictions(adapted, task.in_tokens)
    for number, continuation in enumerate(example.continuations):
        inputs = plain("who was grey ?", "not the dog ." + continuation, return_tensors="pt")
        before = plain("who was grey ?", "not the dog .", return_tensors="pt")["input_ids"].shape[1]
        with torch.no_grad():
            own = causal(**inputs).logits[0].double().log_softmax(-1)
        following = inputs["input_ids"][0, before:]
        wanted = sum(float(own[before - 1 + step, token]) for step, token in enumerate(following))
        assert float(answer[number]) == pytest.approx(wanted, abs=5e-6)
