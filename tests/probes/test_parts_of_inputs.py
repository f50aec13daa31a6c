"""Layers that see windows, frames or other parts of the inputs: what is known of their maps, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.attention import load_model
from qkov.analyses.attention.maps.search import source_of
from qkov.analyses.attention.maps.source import LayerMap
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from qkov.probes.maps.model_call import ModelCall
from qkov.probes.maps.parts import why_in_parts
from torch import nn

from ..analyses.tiny_models import small
from .plain_measures import assert_table, plain_measures

POSITIONS = ("sink", "self", "previous", "next")
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def eager(name: str, config: Any) -> Any:
    torch.manual_seed(0)
    model: Any = getattr(transformers, name)._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.eval()


def swin(depths: list[int]) -> Any:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    return eager("SwinModel", transformers.SwinConfig(depths=depths, num_heads=[2] * len(depths), **sizes))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def by_row(maps: torch.Tensor) -> dict[str, np.ndarray]:
    """Entropy and largest weight of maps [part, head, query, key], as means over parts and queries."""
    weights = maps.double().numpy()
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return {"entropy": -(weights * logs).sum(-1).mean((0, 2)), "largest": weights.max(-1).mean((0, 2))}


def demand_parts(probe: AttentionProbe, layer: int, maps: torch.Tensor, words: str) -> None:
    table = probe.table()
    rows = table[table["layer"] == layer]
    for name, wanted in by_row(maps).items():
        np.testing.assert_allclose(rows[name], wanted, atol=1e-5, err_msg=name)
    assert set(rows["queries"]) == {len(maps) * maps.shape[2]}
    assert rows[list(POSITIONS)].isna().all(axis=None)
    assert all(words in reason for reason in rows["unknown"])
    assert rows["finite"].all()


def demand_refusal(probe: AttentionProbe, words: str) -> None:
    for refused in (probe.examples, lambda: probe.examples(by_head=True), lambda: probe.rollout_rows):
        with pytest.raises(CallError, match=words) as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert "example" not in probe._repr_html_().partition("table")[0]


def maps_of_first_windows(model: Any) -> torch.Tensor:
    """The maps of Swin's first block in float64: each window of 4 x 4 tokens by itself, scores with their bias."""
    block = model.encoder.layers[0].blocks[0]
    with torch.no_grad():
        embedded = model.embeddings(IMAGES)[0]
        hidden = block.layernorm_before(embedded).double().numpy().reshape(2, 8, 8, 16)
    attention = block.attention
    weights = {name: getattr(attention, f"{name}_proj").weight.detach().double().numpy() for name in "qk"}
    biases = {name: getattr(attention, f"{name}_proj").bias.detach().double().numpy() for name in "qk"}
    table = attention.relative_position_bias.relative_position_bias_table.detach().double().numpy()
    places = [(row, column) for row in range(4) for column in range(4)]
    between = [[(a[0] - b[0] + 3) * 7 + a[1] - b[1] + 3 for b in places] for a in places]
    maps = []
    for image in hidden:
        for down in (0, 4):
            for right in (0, 4):
                window = image[down : down + 4, right : right + 4].reshape(16, 16)
                query, key = ((window @ weights[name].T + biases[name]).reshape(16, 2, 8) for name in "qk")
                scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(8) + table[between].transpose(2, 0, 1)
                maps.append(softmax(scores))
    return torch.tensor(np.stack(maps))


def test_every_block_of_swin_is_measured_over_its_windows_and_examples_are_refused():
    model = swin([2])
    with torch.no_grad(), AttentionProbe(model, relevant=torch.ones(64), rollout_rows=True, maps="all") as probe:
        output = model(IMAGES, output_attentions=True)
    words = "maps of 8 parts .* for 2 inputs, and where these lie in the input is not known"
    reason = words.replace(".*", "(windows, frames or the like)")
    demand_parts(probe, 0, maps_of_first_windows(model), reason)
    # What the model itself returns for a stage is the map of its last block, whose windows are shifted.
    demand_parts(probe, 1, output.attentions[0], reason)
    demand_refusal(probe, f"no examples to list and no rollout over all layers; layer 1 of SwinModel: .*{words}")
    table = probe.table()
    assert table["layer"].unique().tolist() == [0, 1]
    measures = ["relevant", "chance", "relevant_at_readout", "chance_at_readout"]
    assert table[measures].isna().all(axis=None)
    assert all(name in table["unknown"][0] for name in (*measures, *POSITIONS))
    assert "not known: " in probe._repr_html_()
    assert [kept.shape for kept in probe.maps[0, 1]] == [(8, 16, 16)]


def test_stages_of_different_depths_are_numbered_through_and_a_window_as_large_as_the_map_is_a_whole_map():
    model = swin([1, 3])
    with torch.no_grad(), AttentionProbe(model) as probe:
        output = model(IMAGES, output_attentions=True)
    table = probe.table()
    assert table["layer"].unique().tolist() == [0, 1, 2, 3]
    demand_parts(probe, 0, output.attentions[0], "maps of 8 parts")
    last = table[table["layer"] == 3]
    assert set(last["unknown"]) == {""}
    everything = torch.ones(2, 16, dtype=torch.bool)
    wanted = plain_measures([output.attentions[1]], everything, everything, causal=False)
    assert_table(last, {name: wanted[name] for name in (*POSITIONS, "entropy", "largest")}, 1e-5)
    with pytest.raises(CallError, match="no examples to list"):
        probe.examples()


def test_divided_attention_over_frames_and_over_time():
    sizes = {"image_size": 8, "patch_size": 4, "num_frames": 2, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.TimesformerConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    model = eager("TimesformerModel", config)
    seen: dict[str, torch.Tensor] = {}
    layer = model.encoder.layer[0]
    for name in ("attention", "temporal_attention"):
        part = getattr(layer, name).attention
        part.register_forward_hook(lambda _module, args, _output, name=name: seen.update({name: args[0]}))
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(torch.randn(3, 2, 3, 8, 8))
    for number, (name, parts) in enumerate((("attention", 6), ("temporal_attention", 12))):
        part = getattr(layer, name).attention
        weight = part.qkv.weight.detach().double().numpy()
        hidden = seen[name].double().numpy()
        projected = (hidden @ weight.T + part.qkv.bias.detach().double().numpy()).reshape(*hidden.shape[:2], 3, 2, 8)
        query, key = projected[:, :, 0], projected[:, :, 1]
        maps = softmax(np.einsum("nqhd,nkhd->nhqk", query, key) / np.sqrt(8))
        assert len(maps) == parts
        demand_parts(probe, number, torch.tensor(maps), f"maps of {parts} parts (windows, frames or the like) for 3 in")
    with pytest.raises(CallError, match="no examples to list"):
        probe.examples()


def test_windows_in_some_layers_leave_the_others_whole():
    sizes: dict[str, Any] = {"hidden_size": 16, "image_size": 32, "patch_size": 4, "window_size": 4}
    config = transformers.VitDetConfig(num_hidden_layers=2, num_attention_heads=2, window_block_indices=[0], **sizes)
    model = eager("VitDetModel", config)
    with torch.no_grad(), AttentionProbe(model) as probe:
        output = model(IMAGES, output_attentions=True)
    demand_parts(probe, 0, output.attentions[0], "maps of 8 parts")
    whole = probe.table().query("layer == 1")
    everything = torch.ones(2, 64, dtype=torch.bool)
    wanted = plain_measures([output.attentions[1]], everything, everything, causal=False)
    assert_table(whole, {name: wanted[name] for name in (*POSITIONS, "entropy", "largest")}, 1e-5)
    with pytest.raises(CallError, match="no examples to list and no rollout"):
        probe.examples()


@pytest.mark.parametrize("name", ["Swinv2", "DonutSwin"])
def test_relatives_of_swin(name):
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4, "depths": [2]}
    model = eager(f"{name}Model", getattr(transformers, f"{name}Config")(num_heads=[2], **sizes))
    with torch.no_grad(), AttentionProbe(model) as probe:
        output = model(IMAGES, output_attentions=True)
    # What the model returns for its only stage is the map of the last of two blocks.
    demand_parts(probe, 1, output.attentions[0], "maps of 8 parts")
    assert probe.table()["layer"].unique().tolist() == [0, 1]
    with pytest.raises(CallError, match="no examples to list"):
        probe.examples()


class Windowed(nn.Module):
    """A user's own model of one dimension, which attends within windows of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        del attention_mask
        vectors = self.embedding(tokens).unflatten(1, (-1, 4)).flatten(0, 1)
        return self.attention(vectors, vectors, vectors)[0].reshape(len(tokens), -1, 8)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_windows_in_a_model_of_torch(batch):
    torch.manual_seed(0)
    model = Windowed().eval()
    tokens = torch.randint(0, 50, (batch, 16))
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(tokens)
        vectors = model.embedding(tokens).view(-1, 4, 8)
        _, maps = model.attention(vectors, vectors, vectors, average_attn_weights=False)
    demand_parts(probe, 0, maps, f"maps of {4 * batch} parts")
    # Nobody said what is relevant.
    assert not {"relevant", "chance", "relevant_at_readout", "chance_at_readout"} & set(probe.table())
    with pytest.raises(CallError, match=f"maps of {4 * batch} parts .* for {batch} input"):
        probe.examples()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"mask": torch.ones(16)}, "mask"), ({"queries": "last"}, "queries"), ({"queries": torch.ones(4)}, "queries")],
)
def test_a_mask_of_the_inputs_does_not_go_with_parts(options, named):
    model = Windowed().eval()
    with AttentionProbe(model, **options), pytest.raises(CallError, match=f"the probe's {named} is of the inputs"):
        model(torch.ones(2, 16, dtype=torch.long))


def test_a_mask_with_padding_in_the_call_does_not_go_with_parts_either():
    model, tokens = Windowed().eval(), torch.ones(2, 16, dtype=torch.long)
    with AttentionProbe(model, measures=["entropy"]) as probe:
        model(tokens, attention_mask=torch.ones_like(tokens))
        with pytest.raises(
            CallError, match="attention_mask is of the inputs, and layer 0 of Windowed has maps of parts"
        ):
            model(tokens, attention_mask=torch.arange(16).expand(2, -1) < 10)
    assert set(probe.table()["queries"]) == {32}
    assert set(probe.table()["partial"]) == {"1 call ended by an error, and is not counted"}


def test_several_choices_for_each_example_are_sequences_of_their_own():
    model = eager("BertForMultipleChoice", small("BertConfig"))
    ids = torch.randint(8, 50, (2, 3, 5))
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(ids)
    with torch.no_grad(), AttentionProbe(model.bert) as flat:
        model.bert(ids.flatten(0, 1))
    assert probe.table().drop(columns="finite").to_numpy() == pytest.approx(
        flat.table().drop(columns="finite").to_numpy(), abs=1e-6
    )
    assert len(probe.examples()) == 6


IDS, VECTORS = torch.long, torch.float32


@pytest.mark.parametrize(
    ("shape", "dtype", "positions_first", "whole", "parts"),
    [
        # One sequence without a batch.
        ((5,), IDS, False, {1}, {5: 1, 2: 1}),
        ((5, 8), VECTORS, False, {1, 5}, {3: 1}),
        # Sequences for each example, and all of them.
        ((2, 3, 5), IDS, False, {2, 6}, {3: 2}),
        # The first dimension counts the inputs.
        ((2, 5), IDS, False, {2}, {1: 2, 4: 2}),
        ((5, 5), IDS, False, {5}, {1: 5}),
        ((7, 8), VECTORS, False, {7}, {1: 7}),
        ((7,), VECTORS, False, {7}, {1: 7}),
        ((5,), VECTORS, True, {5}, {1: 5}),
        ((5, 3, 8), VECTORS, False, {5}, {3: 5}),
        # Vectors by position, and then by example.
        ((5, 3, 8), VECTORS, True, {3, 5}, {4: 3, 1: 3}),
        ((7, 3, 8), VECTORS, True, {7}, {3: 7}),
    ],
)
def test_the_number_of_inputs_that_a_tensor_may_stand_for(shape, dtype, positions_first, whole, parts):
    source = source_of(nn.MultiheadAttention(8, 2))
    source.positions_first = positions_first
    for maps in whole | set(parts):
        layer_map = LayerMap(("", 0), torch.full((maps, 2, 5, 5), 0.2))
        why = why_in_parts(layer_map, ModelCall(source, {"input": torch.ones(shape, dtype=dtype)}))
        if maps in whole:
            assert why is None
        else:
            count = parts[maps]
            words = f"maps of {maps} parts (windows, frames or the like) for {count} input{'s' * (count > 1)}, and"
            assert why is not None
            assert words in why


@pytest.mark.parametrize(("given", "count"), [("one text", 1), (["one text"], 1), (("one", "two", "three"), 3)])
def test_the_number_of_inputs_is_that_of_texts_where_a_model_is_called_with_them(given, count):
    source = source_of(nn.MultiheadAttention(8, 2))
    for maps in (1, 2, 3):
        layer_map = LayerMap(("", 0), torch.full((maps, 2, 5, 5), 0.2))
        why = why_in_parts(layer_map, ModelCall(source, {"input": given}))
        assert (why is None) == (maps == count)


def in_order() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], int]]:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    vectors = torch.randn(5, 3, 8)
    attention = nn.MultiheadAttention(8, 2)
    return {
        "positions first": (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), (vectors,), 3),
        "attention, positions first": (attention, (vectors,) * 3, 3),
        "no batch": (nn.MultiheadAttention(8, 2, batch_first=True), (vectors[:, 0],) * 3, 1),
        "as many positions as examples": (attention, (vectors[:3],) * 3, 3),
    }


@pytest.mark.parametrize("kind", list(in_order()))
def test_whole_maps_of_torch_s_own_layouts(kind):
    model, inputs, examples = in_order()[kind]
    with torch.no_grad(), AttentionProbe(model.eval()) as probe:
        model(*inputs)
    assert len(probe.examples()) == examples
    assert "unknown" not in probe.table()


class Composed(nn.Module):
    """A model that is called with what a data loader gives: a mapping, or an object with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Windowed()

    def forward(self, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"] if isinstance(batch, dict) else batch.read()
        return self.inner(tokens)


class Numbers:
    """An object from which nobody can tell how many inputs it stands for."""

    __slots__ = ()

    def read(self) -> torch.Tensor:
        return torch.ones(1, 4, dtype=torch.long)


def test_the_number_of_inputs_is_found_in_a_mapping_and_is_not_known_without_a_tensor():
    model = Composed().eval()
    with torch.no_grad(), AttentionProbe(model) as probe:
        model({"labels": torch.zeros(7), "input_ids": torch.ones(3, 4, dtype=torch.long)})
    assert len(probe.examples()) == 3
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(Numbers())
    with pytest.raises(CallError, match="the call of Composed has no tensor that shows how many inputs it has"):
        probe.examples()


@pytest.mark.parametrize("beams", [1, 3])
def test_beams_are_the_inputs_of_the_calls_that_generate_makes(beams):
    model = eager("GPT2LMHeadModel", transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=50))
    options = {"pad_token_id": 0, "max_new_tokens": 3, "min_new_tokens": 3, "num_beams": beams}
    with torch.no_grad(), AttentionProbe(model, measures=["entropy"]) as probe:
        model.generate(torch.ones(2, 4, dtype=torch.long), use_cache=False, do_sample=False, **options)
    assert "unknown" not in probe.table()
    assert len(probe.examples()) == 3 * 2 * beams
    assert sorted(set(probe.examples()["tokens"])) == [4, 5, 6]


def test_rollout_is_left_out_where_layers_keep_fewer_positions():
    sizes = {"d_model": 48, "n_head": 4, "d_head": 12, "d_inner": 64, "block_sizes": [1, 1], "num_decoder_layers": 0}
    model = eager("FunnelBaseModel", transformers.FunnelConfig(vocab_size=50, **sizes))
    with torch.no_grad(), AttentionProbe(model, measures=["entropy", "relevant", "rollout"]) as probe:
        model(torch.randint(8, 50, (2, 8)))
    assert probe.examples()["rollout"].isna().all()


class TwoStreams(nn.Module):
    """A classifier that attends in a sequence and in the reverse of it, as two sequences of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        vectors = self.embedding(tokens)
        both = torch.cat([vectors, vectors.flip(1)])
        return self.head(self.attention(both, both, both)[0][: len(tokens), 0])


def test_explain_refuses_maps_of_parts_of_a_sequence():
    model = TwoStreams().eval()
    with pytest.raises(CallError, match="layer 0 of TwoStreams gives 2 maps for one sequence") as caught:
        load_model(model, "classifier")
    assert "\n" not in str(caught.value)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(torch.ones(3, 5, dtype=torch.long))
    with pytest.raises(CallError, match=r"maps of 6 parts .* for 3 inputs"):
        probe.examples()
