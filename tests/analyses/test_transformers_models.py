"""Models of transformers as the measures see them: the same logits and maps as their own, whatever the batch."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import Batch
from qkov.analyses.attention.models.transformers import (
    TransformersCausalLM,
    TransformersClassifier,
    TransformersMaskedLM,
)
from qkov.analyses.tasks import Example
from qkov.circuits import CallError, QkovError, open_model

from .tiny_models import CAUSAL, MASK, MASKED, TINY, VOCABULARY, gpt2, modern_bert, small

#: Entries are of the order of 1 and in float32.
assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
LENGTHS = (9, 6, 3)


@pytest.fixture(params=TINY, ids=lambda tiny: tiny.name)
def tiny(request):
    return request.param


def tokens_and_mask(pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of several lengths; padding is no token of theirs."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.where(mask, tokens, pad), mask


def own_run(model: Any, tokens: torch.Tensor) -> Any:
    """The model's own run of one sequence, without padding and with the maps that it keeps."""
    with torch.no_grad():
        return model(input_ids=tokens[None], output_attentions=True)


def test_logits_and_maps_are_the_model_s_own_whatever_they_are_batched_with(tiny):
    adapted = tiny.adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    maps: list[tuple[int, torch.Tensor]] = []
    with torch.no_grad():
        logits = adapted.logits(tokens, mask, maps=lambda layer, given: maps.append((layer, given)))
        assert_same(adapted.logits(tokens, mask), logits)
    assert [layer for layer, _ in maps] == [0, 1] == list(range(adapted.layers))
    assert (adapted.causal, adapted.heads) == (tiny.causal, maps[0][1].shape[1])
    model = tiny.build()
    model.set_attn_implementation("eager")
    for row, length in enumerate(LENGTHS):
        own = own_run(model, tokens[row, :length])
        assert_same(logits[row] if adapted.classifies else logits[row, :length], own.logits[0])
        for (_, given), wanted in zip(maps, own.attentions, strict=True):
            assert_same(given[row, :, :length, :length], wanted[0])
            assert not given[row, :, :length, length:].any()


def test_embeddings_in_place_of_tokens_give_the_same(tiny):
    adapted = tiny.adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    with torch.no_grad():
        wanted = adapted.logits(tokens, mask)
        found = adapted.logits(tokens, mask, embedded=adapted.embed(tokens))
    assert_same(found if adapted.classifies else found[mask], wanted if adapted.classifies else wanted[mask])


def test_inputs_are_what_the_values_are_made_of(tiny):
    adapted = tiny.adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    read: list[torch.Tensor] = []
    handles = [
        adapted._model.get_submodule(path).register_forward_pre_hook(lambda _module, args: read.append(args[0]))
        for path in dict.fromkeys(tiny.values.format(layer) for layer in range(2))
    ]
    given: list[torch.Tensor] = []
    order: list[str] = []

    def keep(layer: int, value: torch.Tensor) -> None:
        given.append(value)
        order.append(f"inputs {layer}")

    adapted.logits(
        tokens,
        mask,
        inputs=keep,
        maps=lambda layer, _given: order.append(f"map {layer}"),
    )
    for handle in handles:
        handle.remove()
    assert order == ["inputs 0", "map 0", "inputs 1", "map 1"]
    for found, wanted in zip(given, read, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_maps_are_handed_on_and_not_kept(tiny):
    adapted = tiny.adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    alive: list[weakref.ref] = []

    def watch(_layer: int, given: torch.Tensor) -> None:
        assert all(earlier() is None for earlier in alive)
        alive.append(weakref.ref(given))

    with torch.no_grad():
        adapted.logits(tokens, mask, maps=watch)
    assert len(alive) == 2
    assert all(given() is None for given in alive)


def test_gradients_with_respect_to_maps_are_those_of_what_is_read(tiny):
    adapted = tiny.adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    maps: list[torch.Tensor] = []
    logits = adapted.logits(tokens, mask, maps=lambda _layer, given: maps.append(given))
    places = adapted.readout(mask) if not isinstance(adapted, TransformersMaskedLM) else torch.tensor([4, 2, 1])
    at = logits[:, 0] if adapted.classifies else logits[torch.arange(3), places, 0]
    first, last = torch.autograd.grad(at.sum(), maps)
    assert first.any()
    # Above the last layer nothing mixes positions, so that only the row where the prediction is read matters.
    rows = last.abs().sum(dim=(1, 3)) > 0
    assert torch.equal(rows, torch.nn.functional.one_hot(places, mask.shape[1]).bool())


@pytest.mark.parametrize("tiny", [*CAUSAL, *MASKED], ids=lambda tiny: tiny.name)
def test_logits_at_some_positions_are_those_of_the_whole(tiny):
    adapted = tiny.adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    positions = torch.tensor([[0, 8], [5, 2], [1, 1]])
    with torch.no_grad():
        whole = adapted.logits(tokens, mask)
        found = adapted.logits_at(tokens, mask, positions)
    assert_same(found, torch.stack([whole[row, at] for row, at in enumerate(positions)]))


def test_weights_are_those_of_the_layers(tiny):
    adapted = tiny.adapted()
    if tiny.name.startswith("Deberta"):
        with pytest.raises(QkovError, match="disentangled"):
            adapted.attention_weights()
        return
    weights = adapted.attention_weights()
    assert len(weights) == adapted.layers
    expected = list(open_model(tiny.build()).layers())
    for layer, found in enumerate(weights):
        torch.testing.assert_close(found.W_V, expected[min(layer, len(expected) - 1)].W_V, rtol=0, atol=0)


def test_values_through_the_weights_and_the_maps_are_what_attention_gave():
    adapted = CAUSAL[1].adapted()
    tokens, mask = tokens_and_mask(adapted.pad)
    inputs: list[torch.Tensor] = []
    maps: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _module, _args, output: outputs.append(output[0]))
        for layer in adapted._model.model.layers
    ]
    with torch.no_grad():
        adapted.logits(
            tokens,
            mask,
            maps=lambda _layer, given: maps.append(given),
            inputs=lambda _layer, given: inputs.append(given),
        )
    for handle in handles:
        handle.remove()
    for layer, weights in enumerate(adapted.attention_weights()):
        W_V = weights.W_V.repeat_interleave(weights.group_size, dim=0)
        written = torch.einsum("bhqk,bkd,hde,hef->bqf", maps[layer], inputs[layer], W_V, weights.W_O)
        assert_same(written[mask], outputs[layer][mask])


def test_tokens_hidden_by_the_mask_are_not_seen_and_keep_their_place():
    adapted = CAUSAL[0].adapted()
    tokens = torch.randint(8, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[True, True, False, True, True, False]])
    maps: list[torch.Tensor] = []
    with torch.no_grad():
        found = adapted.logits(tokens, mask, maps=lambda _layer, given: maps.append(given))
        wanted = adapted._model(input_ids=tokens[:, [0, 1, 3, 4]], position_ids=torch.tensor([[0, 1, 3, 4]])).logits
    assert_same(found[0, 4], wanted[0, -1])
    assert not maps[0][0, :, 4, 2].any()
    assert adapted.readout(mask).tolist() == [4]


def test_the_last_token_of_a_classifier_is_told_by_the_mask_though_it_is_the_padding_s_id():
    config = small("LlamaConfig", pad_token_id=0, num_labels=3)
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config)
    adapted = TransformersClassifier(model)
    tokens = torch.tensor([[9, 12, 0, 0], [9, 12, 0, 0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    logits = adapted.logits(tokens, mask)
    hidden = model.model(tokens[:1, :3]).last_hidden_state
    assert_same(logits[0], model.score(hidden[0, 2]))
    assert_same(logits[1], model.score(hidden[0, 1]))


def test_encoders_are_read_at_their_first_token_and_mean_pooling_has_no_row():
    torch.manual_seed(0)
    mask = torch.ones(2, 4, dtype=torch.bool)
    first = TransformersClassifier(transformers.ModernBertForSequenceClassification(modern_bert()))
    assert first.readout(mask).tolist() == [0, 0]
    pooled = TransformersClassifier(
        transformers.ModernBertForSequenceClassification(modern_bert(classifier_pooling="mean"))
    )
    assert pooled.logits(torch.full((2, 4), 9), mask).shape == (2, 2)
    with pytest.raises(CallError, match="reads its prediction off several positions"):
        pooled.readout(mask)


def test_a_masked_language_model_is_read_at_its_mask_token():
    adapted = MASKED[0].adapted()
    special = (True, False, True, True)
    examples = [Example(tokens=(2, 9, MASK, 3), special=special), Example(tokens=(2, MASK, MASK, 3), special=special)]
    batch = Batch.of(examples, adapted.pad)
    assert adapted.reading_positions(batch).tolist() == [2, 2]
    with pytest.raises(CallError, match="not from the mask of 2 examples"):
        adapted.readout(batch.mask)
    for tokens, count in (((2, 9, 3), 0), ((MASK, 9, MASK), 2)):
        with pytest.raises(CallError, match=f"example odd has {count} mask tokens"):
            adapted.reading_positions(Batch.of([Example(tokens=tokens, id="odd")], adapted.pad))


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (small("BertConfig"), 32),
        # Its table begins behind the row of the padding.
        (small("RobertaConfig", pad_token_id=1), 30),
    ],
    ids=["bert", "roberta"],
)
def test_sequences_longer_than_the_context_are_refused(config, context):
    model = transformers.AutoModelForMaskedLM.from_config(config)
    adapted = TransformersMaskedLM(model, mask_token=MASK, name="a model")
    assert adapted.context == context
    adapted.logits(torch.full((1, context), 9), torch.ones(1, context, dtype=torch.bool))
    with pytest.raises(CallError, match=f"a model takes at most {context} tokens, got {context + 1}"):
        adapted.logits(torch.full((1, context + 1), 9), torch.ones(1, context + 1, dtype=torch.bool))


@pytest.mark.parametrize(("unknown", "named"), [(VOCABULARY, f"{VOCABULARY}"), (-1, "-1")])
def test_ids_that_are_not_in_the_vocabulary_are_refused(unknown, named):
    adapted = TransformersCausalLM(transformers.GPT2LMHeadModel(gpt2()), name="a model")
    tokens, mask = torch.tensor([[9, unknown]]), torch.ones(1, 2, dtype=torch.bool)
    refusal = f"a model has a vocabulary of {VOCABULARY} tokens, and a sequence has the id {named}; use the tokenizer"
    with pytest.raises(CallError, match=refusal):
        adapted.logits(tokens, mask)
    with pytest.raises(CallError, match=refusal):
        adapted.embed(tokens)
    adapted.logits(tokens.clamp(0, VOCABULARY - 1), mask)


def test_padding_that_the_vocabulary_lacks_is_no_padding_of_its_own():
    model = transformers.GPT2LMHeadModel(gpt2(pad_token_id=None))
    adapted = TransformersCausalLM(model)
    assert (adapted.pad, adapted.own_padding) == (0, False)
    assert CAUSAL[1].adapted().own_padding


def test_half_precision_comes_back_as_float32():
    adapted = TransformersCausalLM(CAUSAL[1].build().bfloat16())
    logits = adapted.logits(torch.full((1, 4), 9), torch.ones(1, 4, dtype=torch.bool))
    assert logits.dtype == torch.float32


def traces(model: Any) -> list[Any]:
    """Everything of a model that an instrument might change and that its owner would notice."""
    modules = list(model.modules())
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return [
        [module.training for module in modules],
        [config._attn_implementation for config in configs.values()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        [parameter.requires_grad for parameter in model.parameters()],
    ]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mode_and_attention_are_as_they_were_after_every_call(attention, training):
    model = CAUSAL[1].build().train(training)
    model.model.layers[0].eval()
    model.model.layers[1].train()
    model.set_attn_implementation(attention)
    before = traces(model)
    adapted = TransformersCausalLM(model)
    assert traces(model) == before
    tokens, mask = torch.full((1, 4), 9), torch.ones(1, 4, dtype=torch.bool)
    seen: list[tuple[bool, str]] = []
    adapted.logits(
        tokens, mask, maps=lambda _layer, _map: seen.append((model.training, model.config._attn_implementation))
    )
    assert seen == [(False, "eager")] * 2
    assert traces(model) == before
    adapted.embed(tokens)
    adapted.attention_weights()
    assert traces(model) == before

    def fail(_layer: int, _map: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted.logits(tokens, mask, maps=fail)
    assert traces(model) == before


def test_a_refused_model_is_as_it_was():
    model = transformers.BertLMHeadModel(small("BertConfig", attn_implementation="sdpa")).train()
    before = traces(model)
    with pytest.raises(CallError, match="sees those after it"):
        TransformersCausalLM(model)
    assert traces(model) == before


def test_dropout_does_not_reach_what_is_measured_in_a_model_that_trains():
    model = transformers.GPT2LMHeadModel(gpt2()).train()
    adapted = TransformersCausalLM(model)
    tokens, mask = torch.full((1, 4), 9), torch.ones(1, 4, dtype=torch.bool)
    found = adapted.logits(tokens, mask)
    with torch.no_grad():
        torch.testing.assert_close(found, model.eval()(tokens).logits)


def test_fused_attention_is_set_to_eager_whenever_it_is_needed():
    model = CAUSAL[1].build()
    model.set_attn_implementation("eager")
    adapted = TransformersCausalLM(model)
    model.set_attn_implementation("sdpa")
    tokens, mask = torch.full((1, 4), 9), torch.ones(1, 4, dtype=torch.bool)
    maps: list[torch.Tensor] = []
    adapted.logits(tokens, mask, maps=lambda _layer, attention: maps.append(attention))
    assert [tuple(attention.shape) for attention in maps] == [(1, 4, 4, 4)] * 2


def test_fused_attention_that_cannot_be_changed_and_loses_its_mask_when_asked_for_maps_is_refused():
    config = small("FalconConfig")
    config._attn_implementation = "sdpa"
    with pytest.raises(CallError, match=r"is sdpa and cannot be changed.*attn_implementation='eager'"):
        TransformersCausalLM(transformers.FalconForCausalLM(config))


def test_fused_attention_that_cannot_be_changed_gives_maps_where_a_call_asks_for_them(monkeypatch):
    # As in the classes of transformers 4 that are made for sdpa, and compute their maps when a call wants them.
    monkeypatch.setattr(transformers.BertForMaskedLM, "_can_set_attn_implementation", lambda *_given: False)
    forward = transformers.BertForMaskedLM.forward

    def asked(self: Any, *args: Any, output_attentions: bool = False, **kwargs: Any) -> Any:
        self.config._attn_implementation_internal = "eager" if output_attentions else "sdpa"
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.BertForMaskedLM, "forward", asked)
    model = MASKED[0].build()
    adapted = TransformersMaskedLM(model, mask_token=MASK)
    tokens, mask = tokens_and_mask(adapted.pad)
    maps: list[torch.Tensor] = []
    logits = adapted.logits(tokens, mask, maps=lambda _layer, given: maps.append(given))
    assert torch.autograd.grad(logits[mask].sum(), maps)[1].any()
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    wanted: list[torch.Tensor] = []
    MASKED[0].adapted().logits(tokens, mask, maps=lambda _layer, given: wanted.append(given))
    for one, other in zip(maps, wanted, strict=True):
        assert_same(one, other)


def test_a_layer_whose_attention_stays_fused_is_named(monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "set_attn_implementation", lambda *_given: None)
    model = CAUSAL[1].build()
    with pytest.raises(CallError, match=r"layer 0 of .* gave no attention map; fused .*attn_implementation='eager'"):
        TransformersCausalLM(model)


def bert(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(small("BertConfig", **changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TransformersCausalLM(
                transformers.T5ForConditionalGeneration(
                    transformers.T5Config(d_model=48, num_heads=4, num_layers=2, d_kv=12, vocab_size=VOCABULARY)
                )
            ),
            "T5ForConditionalGeneration has an encoder and a decoder",
        ),
        (
            lambda: TransformersClassifier(
                transformers.XLNetForSequenceClassification(
                    transformers.XLNetConfig(d_model=48, n_head=4, n_layer=2, d_inner=64, vocab_size=VOCABULARY)
                )
            ),
            "layer 0 of XLNetForSequenceClassification gave no attention map; XLNetRelativeAttention is not supported",
        ),
        (lambda: TransformersCausalLM(bert("BertLMHeadModel")), "sees those after it"),
        (lambda: TransformersClassifier(bert("BertForTokenClassification")), r"outputs of shape \[1, 5, 2\]"),
        (lambda: TransformersClassifier(bert("BertForSequenceClassification", num_labels=1)), r"shape \[1, 1\]"),
        (
            lambda: TransformersClassifier(
                bert("BertForSequenceClassification", problem_type="multi_label_classification")
            ),
            "do not exclude each other",
        ),
    ],
    ids=["encoder-decoder", "other maps", "not causal", "token classes", "regression", "several labels"],
)
def test_models_without_a_single_row_or_classes_are_refused(make, message):
    with pytest.raises(CallError, match=message):
        make()
