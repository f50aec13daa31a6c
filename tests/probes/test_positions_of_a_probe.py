"""Cached, windowed, padded and packed calls are measured as one whole call of the model is, by plain loops."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.attention.maps.columns import WHOLE, Columns, Unknown
from qkov.analyses.attention.maps.search import source_of
from qkov.analyses.attention.maps.source import LayerMap
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from qkov.probes.maps.masks import MapInCall, TokenMasks
from qkov.probes.maps.model_call import ModelCall
from qkov.probes.maps.positions import Positions, Row, keys_among, positions_of

from ..analyses.tiny_models import Tiny, cache_name, gpt2, small
from .plain_measures import assert_table, plain_measures

PROMPT, NEW = 9, 4
LENGTHS = (9, 6, 3)
NAMES = ("entropy", "largest", "relevant", "chance", "sink", "self", "previous", "next")
GREEDY: Any = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
GROUPED: Any = {"num_key_value_heads": 2, "head_dim": 12}
LAYERS = ["sliding_attention", "full_attention"]
WINDOW = 4
MODELS: dict[str, tuple[Callable[[], Any], tuple[int | None, int | None]]] = {
    "GPT2LMHeadModel": (gpt2, (None, None)),
    "LlamaForCausalLM": (lambda: small("LlamaConfig", num_key_value_heads=2), (None, None)),
    "MistralForCausalLM": (
        lambda: small("MistralConfig", num_key_value_heads=2, sliding_window=WINDOW),
        (WINDOW, WINDOW),
    ),
    "Gemma2ForCausalLM": (
        lambda: small("Gemma2Config", sliding_window=WINDOW, layer_types=LAYERS, **GROUPED),
        (WINDOW, None),
    ),
    "Gemma3ForCausalLM": (
        lambda: small("Gemma3TextConfig", sliding_window=WINDOW, layer_types=LAYERS, **GROUPED),
        (WINDOW, None),
    ),
    "OPTForCausalLM": (lambda: small("OPTConfig", ffn_dim=64, word_embed_proj_dim=48), (None, None)),
}


def built(name: str) -> Any:
    model = Tiny(name, MODELS[name][0], "").build()
    model.set_attn_implementation("eager")
    return model


def prompt() -> torch.Tensor:
    return torch.randint(8, 50, (3, PROMPT), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    mask = torch.arange(PROMPT) < torch.tensor(LENGTHS)[:, None]
    return mask.flip(1) if side == "left" else mask


def relevance() -> torch.Tensor:
    return torch.rand(3, PROMPT, generator=torch.Generator().manual_seed(2)) < 0.4


def whole_maps(model: Any, ids: torch.Tensor, mask: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    """The maps of one call without a cache, over all tokens."""
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(ids, **({"attention_mask": mask.long(), "position_ids": places} | given), **ASKED)
    return list(output.attentions)


ASKED: Any = {"output_attentions": True, "use_cache": False}


def plain(
    name: str, maps: list[torch.Tensor], mask: torch.Tensor, relevant: torch.Tensor, **options: Any
) -> dict[str, np.ndarray]:
    """The measures by plain loops, layer by layer with its own window."""
    by_layer = [
        plain_measures([attention], mask, relevant, window=window, **options)
        for attention, window in zip(maps, MODELS[name][1], strict=True)
    ]
    return {measure: np.concatenate([layer[measure] for layer in by_layer]) for measure in NAMES}


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_generating_with_left_padding_is_measured_as_one_whole_call(name, cache):
    model, ids, mask, relevant = built(name), prompt(), padding("left"), relevance()
    kind = {"use_cache": False} if cache == "none" else {"cache_implementation": cache, "disable_compile": True}
    with torch.no_grad(), AttentionProbe(model, relevant=relevant, queries="last") as probe:
        whole = model.generate(ids, attention_mask=mask.long(), **kind, **GREEDY)
    shown = torch.nn.functional.pad(mask, (0, NEW), value=True)
    on = torch.nn.functional.pad(relevant, (0, NEW))
    asked = (torch.arange(PROMPT + NEW) >= PROMPT - 1) & (torch.arange(PROMPT + NEW) < PROMPT + NEW - 1)
    maps = whole_maps(model, whole, shown)
    # The last token of each call sees no next one.
    wanted = plain(name, maps, shown, on, asked=asked.expand(3, -1)) | {"next": np.full((2, 4), np.nan)}
    table, examples = probe.table(), probe.examples()
    assert_table(table, wanted, 1e-5)
    assert set(table["queries"]) == {3 * NEW}
    np.testing.assert_allclose(table["relevant_at_readout"], wanted["relevant"].flatten(), atol=1e-5)
    np.testing.assert_allclose(table["chance_at_readout"], wanted["chance"].flatten(), atol=1e-6)
    assert list(examples["tokens"]) == [length + step for step in range(NEW) for length in LENGTHS]
    assert list(examples["readout"]) == [PROMPT - 1 + step for step in range(NEW) for _ in LENGTHS]
    assert list(examples["relevant"]) == (relevant & mask).sum(1).tolist() * NEW
    assert set(table["unknown"]) == {"next: no query has such a token"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_call_is_measured_as_the_rest_of_the_whole(name, side):
    model, ids, relevant = built(name), prompt(), relevance()
    mask = padding(side)
    rest = torch.randint(8, 50, (3, 5), generator=torch.Generator().manual_seed(3))
    whole, shown = torch.cat([ids, rest], dim=1), torch.nn.functional.pad(mask, (0, 5), value=True)
    shown[0, -2:] = False
    places = (shown.long().cumsum(-1) - 1).clamp(min=0)
    cache = transformers.DynamicCache(config=model.config)
    given = {cache_name(model): cache, "use_cache": True}
    with torch.no_grad():
        model(ids, attention_mask=mask.long(), position_ids=places[:, :PROMPT], **given)
        with AttentionProbe(model, relevant=relevant) as probe:
            model(rest, attention_mask=shown.long(), position_ids=places[:, PROMPT:], **given)
    late = (torch.arange(PROMPT + 5) >= PROMPT).expand(3, -1)
    on = torch.nn.functional.pad(relevant, (0, 5))
    wanted = plain(name, whole_maps(model, whole, shown), shown, on, asked=late)
    if side == "right":
        # The token before the first one of this call is some columns away.
        for measure in ("previous", "next"):
            wanted.pop(measure)
    assert_table(probe.table(), wanted, 1e-5)
    assert list(probe.examples()["tokens"]) == [9 + 3, 6 + 5, 3 + 5]


def test_a_key_outside_of_the_window_of_a_cache_is_no_first_token():
    model = built("MistralForCausalLM")
    ids = prompt()[:1]
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :8], **{cache_name(model): cache})
        with AttentionProbe(model) as probe:
            model(ids[:, 8:], **{cache_name(model): cache})
    assert set(probe.table()["sink"]) == {0.0}
    attention = whole_maps(model, ids, torch.ones_like(ids))
    for name, key in (("self", 8), ("previous", 7)):
        wanted = torch.stack([given[0, :, 8, key] for given in attention]).flatten()
        np.testing.assert_allclose(probe.table()[name], wanted.numpy(), atol=1e-6)


def blocks_of(maps: list[torch.Tensor]) -> list[torch.Tensor]:
    """The maps of three sequences of four tokens that are packed into one row, as three examples."""
    return [torch.cat([given[:, :, at : at + 4, at : at + 4] for at in (0, 4, 8)]) for given in maps]


PACKED = torch.arange(12)[None] % 4
ON = torch.rand(3, 4, generator=torch.Generator().manual_seed(5)) < 0.6


@pytest.mark.parametrize("told", ["position_ids", "mask", "both"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"])
def test_packed_sequences_are_measured_as_examples_of_their_own(name, told):
    model = built(name)
    ids = torch.randint(8, 50, (1, 12), generator=torch.Generator().manual_seed(4))
    apart = torch.block_diag(*[torch.ones(4, 4).tril()] * 3).bool()[None, None]
    whole = torch.zeros(1, 1, 12, 12).masked_fill(~apart, torch.finfo(torch.float32).min)
    given: dict[str, Any] = {} if told == "position_ids" else {"attention_mask": whole}
    if told != "mask":
        given["position_ids"] = PACKED
    with torch.no_grad():
        with AttentionProbe(model, relevant=ON.reshape(1, 12)) as probe:
            model(ids, use_cache=False, **given)
        maps = blocks_of(list(model(ids, **given, **ASKED).attentions))
    wanted = plain(name, maps, torch.ones(3, 4, dtype=torch.bool), ON)
    assert bool(ON.any(dim=1).all())
    assert_table(probe.table(), wanted)
    assert "unknown" not in probe.table()
    # What is read is the last token, which reaches its own sequence alone.
    assert probe.examples()["chance"][0] == pytest.approx(float(ON[2].float().mean()))


def test_a_packed_sequence_without_a_relevant_token_counts_for_the_other_measures_alone():
    model, on = built("LlamaForCausalLM"), ON & (torch.arange(3) < 2)[:, None]
    ids = torch.randint(8, 50, (1, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        with AttentionProbe(model, relevant=on.reshape(1, 12)) as probe:
            model(ids, position_ids=PACKED, use_cache=False)
        maps = blocks_of(list(model(ids, position_ids=PACKED, **ASKED).attentions))
    table, example = probe.table(), probe.examples().iloc[0]
    assert_table(table, plain("LlamaForCausalLM", maps, torch.ones(3, 4, dtype=torch.bool), on))
    # The token that is read is in the sequence without one.
    assert table[["relevant_at_readout", "chance_at_readout"]].isna().all(axis=None)
    assert example[["chance", "rollout", "attention"]].isna().all()
    assert example["relevant"] == int(on.sum())


@pytest.mark.parametrize(("told", "causal"), [("position_ids", True), ("mask", True), ("mask", False)])
def test_packed_sequences_of_different_lengths_are_measured_as_examples_of_their_own(told, causal):
    lengths = (1, 3, 2)
    model = built("LlamaForCausalLM") if causal else Tiny("BertModel", lambda: small("BertConfig"), "").build("eager")
    ids = torch.randint(8, 50, (1, 6), generator=torch.Generator().manual_seed(4))
    blocks = [torch.ones(length, length) for length in lengths]
    apart = torch.block_diag(*(block.tril() if causal else block for block in blocks)).bool()[None, None]
    whole = torch.zeros(1, 1, 6, 6).masked_fill(~apart, torch.finfo(torch.float32).min)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    given = {"attention_mask": whole} if told == "mask" else {"position_ids": places}
    relevant = torch.tensor([[1, 0, 1, 1, 0, 1]])
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        maps = list(model(ids, **given, **ASKED).attentions)
    # Each sequence as an example that is padded on the right.
    alone = [torch.zeros(3, 4, 3, 3) for _ in maps]
    on, start = torch.zeros(3, 3), 0
    for example, length in enumerate(lengths):
        part = slice(start, start + length)
        for into, attention in zip(alone, maps, strict=True):
            into[example, :, :length, :length] = attention[0, :, part, part]
        on[example, :length], start = relevant[0, part], start + length
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    wanted = plain_measures(alone, mask, on, causal=causal)
    assert_table(probe.table(), {measure: wanted[measure] for measure in NAMES})


def test_a_mask_for_the_first_call_takes_what_is_generated_for_tokens():
    model, ids, mask = built("LlamaForCausalLM"), prompt(), padding("left")
    with torch.no_grad(), AttentionProbe(model, mask=mask) as probe:
        model.generate(ids, attention_mask=mask.long(), **GREEDY)
    assert list(probe.examples()["tokens"]) == [length + step for step in range(NEW) for length in LENGTHS]
    assert set(probe.table()["queries"]) == {sum(LENGTHS) + 3 * (NEW - 1)}


def test_a_mask_of_other_positions_than_the_map_s_counts_where_it_hides_something():
    attention = LayerMap(("", 0), torch.full((2, 2, 5, 5), 0.2))

    def mask_in_call(mask: Any) -> Any:
        return MapInCall(attention, None, called_with(attention_mask=mask)).mask_in_call(5)

    frames = torch.ones(2, 7)
    assert mask_in_call(frames) is None
    assert mask_in_call(None) is None
    hiding = torch.arange(7).expand(2, -1) < torch.tensor([[7], [4]])
    for mask in (torch.ones(2, 5), hiding, hiding.long(), hiding[1], torch.ones(2, 1, 7, 7), torch.ones(7), 2 * frames):
        assert mask_in_call(mask) is mask


def test_a_mask_for_each_query_says_what_is_padding_whether_or_not_it_has_a_dimension_for_heads():
    shown = torch.tensor([[False, True, True], [True, True, False]])
    seen = shown[:, None] & torch.ones(3, 3).tril().bool()
    attention = LayerMap(("", 0), torch.full((2, 2, 3, 3), 1 / 3), columns=WHOLE)
    for mask in (seen, seen[:, None]):
        sides = TokenMasks(None, None, "all", "last").sides(
            MapInCall(attention, seen, called_with(attention_mask=mask)), None
        )
        assert sides.keys.tolist() == sides.queries.tolist() == shown.tolist()
        assert sides.readout.tolist() == [2, 1]


def test_queries_that_are_asked_for_where_no_positions_are_known_are_as_many_as_the_layer_has():
    attention = LayerMap(("", 0), torch.full((1, 2, 5, 9), 1 / 9), columns=Unknown("it pools"))
    of = MapInCall(attention, None, called_with())
    asked = TokenMasks(None, None, torch.tensor([0, 1, 1, 0, 1]), "last").sides(of, None).asked
    assert asked.tolist() == [[False, True, True, False, True]]
    with pytest.raises(CallError, match="queries has 1 positions, and the map of layer 0 has 5"):
        TokenMasks(None, None, torch.ones(1), "last").sides(of, None)


def test_the_queries_of_a_map_to_an_encoder_are_those_of_the_decoder_be_their_columns_known_or_not():
    own = MapInCall(LayerMap(("decoder", 0), torch.full((1, 2, 3, 4), 0.25), columns=Unknown("it pools")), None, CALL)
    across = MapInCall(LayerMap(("decoder cross", 0), torch.full((1, 2, 3, 5), 0.2), is_self=False), None, CALL)
    masks = TokenMasks(None, None, torch.tensor([1, 0, 1]), "last")
    decoder = masks.sides(own, None)
    assert masks.sides(across, decoder).asked.tolist() == [[True, False, True]]
    assert masks.sides(across, replace(decoder, columns=Columns(0, 0))).asked.tolist() == [[True, False, True]]
    # Of the sequence so far, whose first two tokens are cached.
    longer = replace(masks, queries=torch.tensor([0, 1, 1, 0, 1]))
    assert longer.sides(across, replace(decoder, columns=Columns(2, 0))).asked.tolist() == [[True, False, True]]


def test_several_texts_need_a_mask_and_one_does_not():
    for given in ("two words", ["one text"], ("one text",), torch.ones(2, 3), []):
        called_with(input=given).demand_no_texts()
    with pytest.raises(CallError, match="the model was called with 2 texts, and nothing shows where they were padded"):
        called_with(input=["one", "other"]).demand_no_texts()


def test_positions_that_begin_again_where_tokens_see_each_other_are_not_known():
    model, ids = built("LlamaForCausalLM"), prompt()[:1]
    shown = torch.ones_like(ids)
    with torch.no_grad(), AttentionProbe(model, relevant=torch.arange(PROMPT) < 2) as probe:
        model(ids, attention_mask=shown, position_ids=torch.arange(PROMPT)[None] % 4)
    table = probe.table()
    assert table[["sink", "self", "previous", "next"]].isna().all(axis=None)
    reason = "sink, self, previous, next: position_ids begin again inside a row, and no mask keeps"
    assert table["unknown"].str.startswith(reason).all()
    assert "not known: sink, self, previous, next: position_ids begin again" in probe._repr_html_()
    assert table["finite"].all()
    maps = whole_maps(model, ids, shown, position_ids=torch.arange(PROMPT)[None] % 4)
    wanted = plain_measures(maps, shown.bool(), torch.arange(PROMPT)[None] < 2)
    assert_table(table, {name: wanted[name] for name in ("entropy", "largest", "relevant", "chance")})
    with torch.no_grad(), probe:
        model(ids)
    # One call whose positions are known does not make the mean known.
    assert probe.table()["self"].isna().all()


def test_positions_that_begin_again_are_not_known_where_nothing_says_what_tokens_see():
    tokens = torch.ones(1, 6, dtype=torch.bool)
    row = Row(tokens, WHOLE, tokens, 6, seen=None)
    assert isinstance(positions_of(row, torch.arange(6)[None] % 3, is_split=False), Unknown)
    assert isinstance(positions_of(row, torch.arange(6)[None], is_split=False), Positions)


def test_keys_beyond_the_last_column_are_no_tokens():
    real = torch.tensor([[True, True, True, False], [True, False, True, True]])
    # The keys are the columns 1 to 5, of which there are 4, as in a static cache.
    assert keys_among(real, Columns(3, 1), 5).tolist() == [
        [True, True, False, False, False],
        [False, True, True, False, False],
    ]


def called_with(**arguments: Any) -> ModelCall:
    return ModelCall(source_of(built("LlamaForCausalLM")), arguments)


CALL = called_with()


def test_position_ids_are_had_in_every_shape_that_has_one_row_for_each_example():
    attention = LayerMap(("", 0), torch.full((3, 2, 5, 5), 0.2))
    rows = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 0, 1, 0, 1]])
    images = torch.randint(0, 9, (3, 3, 5), generator=torch.Generator().manual_seed(0))
    for given, wanted in [
        (rows, rows),
        (rows[1], rows[[1, 1, 1]]),
        (rows[1:2], rows[[1, 1, 1]]),
        # Positions in the text, and then those in time, height and width of an image.
        (torch.cat([rows[None], images]), rows),
    ]:
        found = called_with(position_ids=given).position_ids(attention)
        assert found is not None
        assert torch.equal(found, wanted)
    for other in (rows.float(), rows[:2], rows[:, :4], images, images[None], rows[0, 0], None):
        assert called_with(position_ids=other).position_ids(attention) is None


def test_a_mask_of_queries_and_keys_says_what_is_padding_only_with_what_tokens_see_and_their_positions():
    model, ids = built("LlamaForCausalLM"), prompt()
    shown, refused = padding("left"), "attention_mask has shape .* and does not say what is padding; give the probe"
    places = (shown.long().cumsum(-1) - 1).clamp(min=0)
    allowed = shown[:, None, None] & torch.ones(PROMPT, PROMPT).tril().bool()
    whole = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    probe = AttentionProbe(model, relevant=relevance())
    for known in (True, False):
        cache = transformers.DynamicCache(config=model.config)
        given = {cache_name(model): cache, "use_cache": True}
        with torch.no_grad():
            model(ids[:, :6], attention_mask=shown[:, :6].long(), position_ids=places[:, :6], **given)
            given |= {"attention_mask": whole[:, :, 6:]} | ({"position_ids": places[:, 6:]} if known else {})
            with probe, nullcontext() if known else pytest.raises(CallError, match=refused):
                model(ids[:, 6:], **given)
    late = (torch.arange(PROMPT) >= 6).expand(3, -1)
    wanted = plain("LlamaForCausalLM", whole_maps(model, ids, shown), shown, relevance(), asked=late)
    assert_table(probe.table(), wanted, 1e-5)
    assert set(probe.table()["queries"]) == {9}
    unseen = LayerMap(("", 0), torch.full((3, 2, PROMPT, PROMPT), 1 / PROMPT), columns=WHOLE)
    with pytest.raises(CallError, match=refused):
        TokenMasks(None, None, "all", "last").sides(MapInCall(unseen, None, called_with(attention_mask=whole)), None)


def test_queries_that_a_layer_pools_have_no_positions():
    sizes = {"d_model": 48, "n_head": 4, "d_head": 12, "d_inner": 64, "block_sizes": [1, 2], "num_decoder_layers": 1}
    config = transformers.FunnelConfig(vocab_size=50, **sizes)
    torch.manual_seed(0)
    model: Any = transformers.FunnelForSequenceClassification(config).eval()
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(prompt())
    table = probe.table()
    first, pooled = table[table["layer"] == 0], table[table["layer"] == 1]
    assert pooled[["sink", "self", "previous", "next"]].isna().all(axis=None)
    assert all("a layer has 5 queries and 9 keys, and no cache says which" in reason for reason in pooled["unknown"])
    assert pooled["entropy"].notna().all()
    assert set(first["unknown"]) == {""}


def quantised(config: Any) -> Any:
    cache_utils: Any = transformers.cache_utils
    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers quantises no cache by itself")
    return cache_utils.Cache(layers=[cache_utils.Fp8QuantizedLayer() for _ in range(config.num_hidden_layers)])


CACHES: dict[str, Callable[[Any], Any]] = {
    "without the model's windows": lambda _config: transformers.DynamicCache(),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=16),
    "quantised": quantised,
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_every_kind_of_cache_says_which_columns_the_keys_are(name, kind):
    model, ids, mask, relevant = built(name), prompt(), padding("left"), relevance()
    cache = CACHES[kind](model.config)
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), AttentionProbe(model, relevant=relevant, maps="all") as probe:
        for start, end in ((0, 5), (5, 6), (6, PROMPT)):
            given = {"attention_mask": mask[:, :end].long(), "position_ids": places[:, start:end]}
            probe.relevant = relevant[:, :end]
            model(ids[:, start:end], **given, **{cache_name(model): cache}, use_cache=True)
    table = probe.table()
    maps = [
        torch.stack([_joined(probe.maps[layer, head], mask.shape[1]) for head in range(4)], dim=1) for layer in range(2)
    ]
    if kind != "quantised":
        for given, wanted in zip(maps, whole_maps(model, ids, mask), strict=True):
            seen = mask[:, None, :, None] & mask[:, None, None]
            torch.testing.assert_close(given * seen, wanted * seen, rtol=0, atol=1e-5)
    late = plain(name, maps, mask, relevant)
    # What is relevant so far differs from call to call, and a later call sees more of it.
    assert_table(table, {name: late[name] for name in ("entropy", "largest", "sink", "self", "previous")}, 1e-5)


def _joined(parts: list[torch.Tensor], size: int) -> torch.Tensor:
    """The rows of all calls as one map; every key here is still in the cache, or the layer has dropped it."""
    rows, end = [], 0
    for part in parts:
        end += part.shape[1]
        held = part[..., : min(part.shape[2], end)] if part.shape[2] >= end else part
        start = max(0, end - part.shape[2])
        rows.append(torch.nn.functional.pad(held, (start, size - start - held.shape[2])))
    return torch.cat(rows, dim=1)
