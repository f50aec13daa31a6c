"""The probe on every tiny architecture of transformers here, of text, images and sounds: against its own attentions.

The attentions that a model returns are measured again in numpy, query by query. What the probe reads from the call,
such as positions, padding and what a query can see, is here read from the weights: every key that a query of these
models sees has a weight above zero.
"""

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from qkov.analyses.attention.models.transformers import TransformersCausalLM
from qkov.circuits import CallError
from qkov.probes import AttentionProbe

from ..analyses.tiny_models import cache_name
from ..circuits import decoders, encoder_decoders, encoders
from ..circuits.family_proof import Family, build
from .plain_measures import MEASURED, assert_table, measures_of_query

#: Shorter padding than the windows of ModernBERT, whose own eager attention gives NaN to what sees no token.
LENGTHS = (9, 8, 7)
WIDTH = max(LENGTHS)
#: The lengths of the sequences that are packed into each row.
PACKED = ((7, 5), (2, 6, 4))

DECODERS = [family for family in decoders.FAMILIES if family.name not in ("openai-gpt", "gemma3 with images")]
BIDIRECTIONAL = decoders.BY_NAME["gemma3 bidirectional"]
TWO_TOWERS = [family for family in encoders.FAMILIES if family.patterns != "attentions"]
#: transformers gives them no sdpa, which knows neither soft caps nor sinks.
WITHOUT_SDPA = ("gemma2", "gpt_oss")
#: They take no position_ids.
WITHOUT_POSITIONS = [family for family in DECODERS if family.name.startswith(("bloom", "mpt"))]
#: They count the tokens for ALiBi in a padding mask, so that they take no mask of who sees whom.
WITHOUT_MASKS = [family for family in DECODERS if family.name.startswith(("bloom", "falcon alibi"))]
#: They make no mask of position_ids that begin again.
LEAKING = [family for family in DECODERS if family.name in ("opt", "opt norms behind", "xglm", "gpt_oss")]


@cache
def decoder(name: str, attention: str = "eager") -> Any:
    """A decoder that several tests call and leave as it is."""
    if attention == "eager":
        # In float64 the models' eager attention gives NaN to padding on the left.
        return build(decoders.BY_NAME[name]).float()
    model = copy.deepcopy(decoder(name))
    model.set_attn_implementation(attention)
    return model


@dataclass(frozen=True)
class Call:
    """The maps of a layer in one call of the model, and where they are.

    Attributes:
        maps: [batch, head, query, key].
        keys: Which keys are tokens.
        queries: Which queries are tokens.
        offset: The key that is the first query itself; None in cross-attention.
        relevant: Which keys are relevant.
        dropped: Whether the layer has dropped the first token of an example, as a sliding window does.
    """

    maps: np.ndarray
    keys: np.ndarray
    queries: np.ndarray
    offset: int | None
    relevant: np.ndarray
    dropped: np.ndarray | None = None


def of_query(call: Call, example: int, head: int, query: int) -> dict[str, float]:
    """The measures of one query, from its row of weights."""
    row = call.maps[example, head, query].tolist()
    weights = {key: row[key] for key in call.keys[example].nonzero()[0].tolist()}
    seen = [key for key, weight in weights.items() if weight > 0]
    own = None if call.offset is None else call.offset + query
    values = measures_of_query(weights, seen, set(call.relevant[example].nonzero()[0].tolist()), own)
    if call.dropped is not None and call.dropped[example]:
        values["sink"] = 0.0
    return values


def table_of(calls: list[list[Call]]) -> dict[str, np.ndarray]:
    """Each measure as [layer, head]: the mean over the queries of all calls. `calls` has a list for each layer."""
    heads = calls[0][0].maps.shape[1]
    means = {name: np.full((len(calls), heads), np.nan) for name in MEASURED}
    for layer, of_layer in enumerate(calls):
        for head in range(heads):
            rows = [
                of_query(call, example, head, query)
                for call in of_layer
                for example in range(len(call.maps))
                for query in range(call.maps.shape[2])
                if call.queries[example, query]
            ]
            for name in MEASURED:
                values = [row[name] for row in rows if name in row]
                if values:
                    means[name][layer, head] = math.fsum(values) / len(values)
    return means


def tolerance_of(family: Family) -> float:
    return 1e-12 if family.dtype == torch.float64 else 1e-6


def numpys(maps: Any) -> list[np.ndarray]:
    return [layer.detach().double().numpy() for layer in maps]


def relevant_keys(shape: tuple[int, int]) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.4


def text(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and their mask, padded on a side."""
    ids = torch.randint(3, 50, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(WIDTH)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = positions >= WIDTH - lengths if side == "left" else positions < lengths
    return ids, mask


def wants(families: list[Family], is_wanted: Callable[[Family], bool] = lambda _: True) -> Any:
    return pytest.mark.parametrize("family", [each for each in families if is_wanted(each)], ids=lambda each: each.name)


def wants_both(families: list[Family]) -> Any:
    """Each family with eager attention, and with sdpa where transformers has it."""
    pairs = [(each, "eager") for each in families]
    pairs += [(each, "sdpa") for each in families if each.name not in WITHOUT_SDPA]
    return pytest.mark.parametrize(("family", "attention"), pairs, ids=[f"{each.name}-{kind}" for each, kind in pairs])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("openai-gpt", "gave no attention map"), ("gemma3 with images", "holds several stacks of attention")],
)
def test_a_decoder_whose_maps_are_not_had_is_refused(name, reason):
    model = build(decoders.BY_NAME[name])
    with pytest.raises(CallError, match=reason), torch.no_grad(), AttentionProbe(model):
        model(input_ids=text("left")[0])


@wants(DECODERS)
def test_a_decoder_with_left_padding(family):
    model, (ids, mask) = decoder(family.name), text("left")
    relevant = relevant_keys(ids.shape)
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        output = model(input_ids=ids, attention_mask=mask.long(), output_attentions=True)
    calls = [
        [Call(layer, mask.numpy(), mask.numpy(), 0, relevant.numpy())]
        for layer in numpys(attentions(output.attentions))
    ]
    assert_table(probe.table(), table_of(calls), 1e-6)


@wants(DECODERS)
def test_a_decoder_that_generates_token_by_token_with_left_padding(family):
    model, (ids, mask) = decoder(family.name), text("left")
    prompt, held_keys = WIDTH - 2, None
    # Only tokens of the prompt are relevant, and the mask has only those.
    relevant = relevant_keys(ids.shape) & (torch.arange(WIDTH) < prompt)
    calls: list[list[Call]] = []
    with torch.no_grad(), AttentionProbe(model, relevant=relevant[:, :prompt]) as probe:
        for first, end in ((0, prompt), (prompt, prompt + 1), (prompt + 1, WIDTH)):
            output = model(
                input_ids=ids[:, first:end],
                attention_mask=mask[:, :end].long(),
                use_cache=True,
                output_attentions=True,
                **({} if held_keys is None else {cache_name(model): held_keys}),
            )
            held_keys = output.past_key_values
            maps = numpys(attentions(output.attentions))
            calls = calls or [[] for _ in maps]
            for of_layer, layer in zip(calls, maps, strict=True):
                held = slice(end - layer.shape[-1], end)
                keys = mask[:, held].numpy()
                dropped = mask[:, : held.start].any(dim=1).numpy()
                queries = mask[:, first:end].numpy()
                of_layer.append(Call(layer, keys, queries, first - held.start, relevant[:, held].numpy(), dropped))
    table, wanted = probe.table(), table_of(calls)
    if family.name.startswith("mpt"):
        # Its masks do not say which keys a single query sees.
        assert table["chance"].isna().all()
        del wanted["chance"]
    assert_table(table, wanted, 1e-6)


def attentions(maps: Any) -> list[torch.Tensor]:
    """The maps of the layers that have attention."""
    return [layer for layer in maps if layer is not None and layer.numel()]


@wants(TWO_TOWERS)
def test_two_towers_are_refused_and_each_alone_is_not(family):
    model = build(family)
    with pytest.raises(CallError, match=r"holds several stacks of attention .* give one of its parts"):
        AttentionProbe(model)


@wants([family for family in encoders.FAMILIES if family not in TWO_TOWERS])
def test_an_encoder_of_text_images_or_sounds(family):
    model = build(family)
    if family.inputs is None:
        ids, mask = text("right")
        given = {"input_ids": ids, "attention_mask": mask.long()}
        relevant = relevant_keys(ids.shape)
    else:
        torch.manual_seed(1)
        given, mask, relevant = family.inputs(model.config), None, None
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        output = model(**given, output_attentions=True)
    calls = []
    for layer in numpys(attentions(attrgetter(family.patterns)(output))):
        tokens = np.ones((len(layer), layer.shape[-1]), dtype=bool) if mask is None else mask.numpy()
        marked = np.zeros_like(tokens) if relevant is None else relevant.numpy()
        calls.append([Call(layer, tokens, tokens, 0, marked)])
    wanted = table_of(calls)
    if relevant is None:
        wanted = {name: values for name, values in wanted.items() if name not in ("relevant", "chance")}
    assert_table(probe.table(), wanted, tolerance_of(family))


@wants([family for family in encoder_decoders.FAMILIES if family.stack == "encoder"])
def test_an_encoder_and_a_decoder(family):
    model = build(family)
    torch.manual_seed(1)
    given = family.inputs(model.config) if family.inputs else {}
    encoder_mask = None
    if "input_ids" in given:
        ids, encoder_mask = text("right")
        given = {"input_ids": ids, "attention_mask": encoder_mask.long()}
        decoder_ids, decoder_mask = text("right")
        given |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": decoder_mask.long()}
    with torch.no_grad(), AttentionProbe(model) as probe:
        output = model(**given, output_attentions=True)
    table = probe.table()
    for stack in ("encoder", "decoder", "decoder cross"):
        calls = []
        for layer in numpys(attentions(output[f"{stack.split()[-1]}_attentions"])):
            batch, _, queries, keys = layer.shape
            of_keys, of_queries = (np.ones((batch, size), dtype=bool) for size in (keys, queries))
            if encoder_mask is not None:
                of_keys = of_queries = encoder_mask.numpy()
            offset = None if stack == "decoder cross" else 0
            calls.append([Call(layer, of_keys, of_queries, offset, np.zeros_like(of_keys))])
        wanted = table_of(calls)
        measured = {name: wanted[name] for name in MEASURED if name not in ("relevant", "chance")}
        assert_table(table[table["stack"] == stack], measured, tolerance_of(family))


def test_a_decoder_that_sees_what_comes_is_not_explained_as_one_that_predicts_it():
    with pytest.raises(CallError, match="sees those after it"):
        TransformersCausalLM(decoder(BIDIRECTIONAL.name))


@wants([family for family in DECODERS if family is not BIDIRECTIONAL])
def test_the_logits_that_are_explained_are_the_model_s_own(family):
    model, (ids, mask) = decoder(family.name), text("right")
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask.long()).logits
        adapted = TransformersCausalLM(model)
        by_ids = adapted.logits(ids, mask, maps=lambda _layer, _map: None)
        by_embeddings = adapted.logits(ids, mask, embedded=adapted.embed(ids))
    for logits in (by_ids, by_embeddings):
        torch.testing.assert_close(logits[mask], own[mask], rtol=1e-5, atol=1e-5 * float(own.abs().max()))


@wants([family for family in DECODERS if family.name not in WITHOUT_SDPA])
def test_a_decoder_with_sdpa_has_the_figures_of_its_eager_attention(family):
    eager, fused, (ids, mask) = decoder(family.name), decoder(family.name, "sdpa"), text("left")
    relevant, given = relevant_keys(ids.shape), {"input_ids": ids, "attention_mask": mask.long()}
    with torch.no_grad():
        maps = numpys(attentions(eager(**given, output_attentions=True).attentions))
        with AttentionProbe(fused, relevant=relevant) as probe:
            fused(**given)
    calls = [[Call(layer, mask.numpy(), mask.numpy(), 0, relevant.numpy())] for layer in maps]
    assert_table(probe.table(), table_of(calls), 1e-5)


def spans() -> list[tuple[int, slice]]:
    """The row and the columns of each packed sequence."""
    found = []
    for row, lengths in enumerate(PACKED):
        ends = np.cumsum(lengths).tolist()
        found += [(row, slice(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    return found


def packed_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions that begin again with each sequence, and which queries and keys are of one sequence."""
    width = sum(PACKED[0])
    ids = torch.randint(3, 50, (len(PACKED), width), generator=torch.Generator().manual_seed(2))
    positions = torch.zeros_like(ids)
    together = torch.zeros(len(PACKED), width, width, dtype=torch.bool)
    for row, columns in spans():
        positions[row, columns] = torch.arange(columns.stop - columns.start)
        together[row, columns, columns] = True
    return ids, positions, together


def packed_calls(maps: list[np.ndarray], relevant: torch.Tensor) -> list[list[Call]]:
    """The maps of each layer, one for each packed sequence."""
    calls: list[list[Call]] = [[] for _ in maps]
    for of_layer, layer in zip(calls, maps, strict=True):
        for row, columns in spans():
            on = relevant[row, columns].numpy()[None]
            tokens = np.ones_like(on)
            of_layer.append(Call(layer[row, :, columns, columns][None], tokens, tokens, 0, on))
    return calls


def relevant_in_some() -> torch.Tensor:
    """Relevant tokens of packed rows, beside one sequence that has none as well."""
    relevant = relevant_keys((len(PACKED), sum(PACKED[0])))
    row, columns = spans()[3]
    relevant[row, columns.start - 1 : columns.stop + 1] = True
    relevant[row, columns] = False
    return relevant


def demand_packed_figures(family: Family, attention: str, given: dict[str, Any]) -> None:
    """Compare the figures of a call with the maps of its packed sequences, which eager attention gives."""
    model, relevant, together = decoder(family.name, attention), relevant_in_some(), packed_rows()[2]
    with torch.no_grad():
        with AttentionProbe(model, relevant=relevant) as probe:
            output = model(**given, output_attentions=attention == "eager")
        if attention != "eager":
            output = decoder(family.name)(**given, output_attentions=True)
    maps = numpys(attentions(output.attentions))
    assert not any((layer * ~together[:, None].numpy()).any() for layer in maps)
    assert_table(probe.table(), table_of(packed_calls(maps, relevant)), 1e-6 if attention == "eager" else 1e-5)


@wants_both([family for family in DECODERS if family not in WITHOUT_MASKS])
def test_a_decoder_whose_mask_keeps_packed_sequences_apart(family, attention):
    ids, positions, together = packed_rows()
    hidden = ~together if family is BIDIRECTIONAL else ~together.tril()
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[:, None]
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    demand_packed_figures(
        family, attention, given if family in WITHOUT_POSITIONS else given | {"position_ids": positions}
    )


@wants_both([family for family in DECODERS if family not in (*WITHOUT_POSITIONS, *LEAKING)])
def test_a_decoder_that_keeps_packed_sequences_apart_by_their_positions(family, attention):
    ids, positions, _ = packed_rows()
    demand_packed_figures(family, attention, {"input_ids": ids, "position_ids": positions, "use_cache": False})


@wants(LEAKING)
def test_positions_in_packed_rows_are_not_known_where_a_decoder_does_not_keep_the_sequences_apart(family):
    model, (ids, positions, together) = decoder(family.name), packed_rows()
    relevant = relevant_in_some()
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        output = model(input_ids=ids, position_ids=positions, use_cache=False, output_attentions=True)
    maps, tokens = numpys(attentions(output.attentions)), np.ones(ids.shape, dtype=bool)
    assert all((layer * ~together[:, None].numpy()).max() > 0.01 for layer in maps)
    table = probe.table()
    assert table[["sink", "self", "previous", "next"]].isna().all(axis=None)
    assert table["unknown"].str.startswith("sink, self, previous, next: position_ids begin again inside a row").all()
    wanted = table_of([[Call(layer, tokens, tokens, None, relevant.numpy())] for layer in maps])
    assert_table(table, {name: wanted[name] for name in ("entropy", "largest", "relevant", "chance", "no_token")}, 1e-6)


@wants(WITHOUT_MASKS)
def test_a_decoder_that_counts_its_tokens_in_a_padding_mask_takes_no_mask_of_who_sees_whom(family):
    model, (ids, _, together) = decoder(family.name), packed_rows()
    assert ("position_ids" in inspect.signature(model.forward).parameters) == (family not in WITHOUT_POSITIONS)
    with pytest.raises(ValueError, match="too many values to unpack"), AttentionProbe(model):
        model(input_ids=ids, attention_mask=together.tril()[:, None])
