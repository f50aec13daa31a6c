"""What a probe measures while `generate` runs: against the maps that `generate` itself returns."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.probes import AttentionProbe

from ..analyses.tiny_models import small
from .plain_measures import assert_table, plain_measures

IDS = torch.randint(8, 50, (3, 9), generator=torch.Generator().manual_seed(1))
RIGHT = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
RELEVANT = torch.arange(9) % 3 == 1
GREEDY: Any = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def bart() -> Any:
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config: Any = small("BartConfig", d_model=48, **sides, encoder_ffn_dim=64, decoder_ffn_dim=64)
    config.forced_eos_token_id = None
    return transformers.BartForConditionalGeneration(config)


def t5() -> Any:
    config: Any = small("T5Config", d_model=48, d_kv=12, num_heads=4, num_layers=2, d_ff=64, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def composed() -> Any:
    side: Any = small("BertConfig", attn_implementation="eager")
    other: Any = small("BertConfig", attn_implementation="eager", is_decoder=True, add_cross_attention=True)
    parts = {"encoder": transformers.BertModel(side), "decoder": transformers.BertLMHeadModel(other)}
    model = transformers.EncoderDecoderModel(**parts)
    model.generation_config.decoder_start_token_id = 1
    return model


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("build", [bart, t5, composed])
def test_the_encoder_counts_once_where_generate_calls_it_apart(build, beams):
    torch.manual_seed(0)
    model = build().eval()
    model.set_attn_implementation("eager")
    asked = {"num_beams": beams, "output_attentions": True, "return_dict_in_generate": True}
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        output = model.generate(IDS, attention_mask=RIGHT.long(), **asked, **GREEDY)
    table = probe.table()
    assert list(table["stack"].unique()) == ["encoder", "decoder", "decoder cross"]
    encoder = table[table["stack"] == "encoder"]
    assert set(encoder["queries"]) == {9 + 6 + 3}
    maps = list(output.encoder_attentions)
    assert_table(encoder, plain_measures(maps, RIGHT, RELEVANT.expand(3, 9), causal=False))
    cross = table[table["stack"] == "decoder cross"]
    assert set(cross["queries"]) == {3 * beams * len(output.cross_attentions)}
    on = (RELEVANT & RIGHT).repeat_interleave(beams, dim=0)
    for layer in range(2):
        # The maps of every step are [batch, head, 1, key].
        steps = torch.cat([step[layer] for step in output.cross_attentions]).double()
        read = (steps * on.repeat(len(output.cross_attentions), 1)[:, None, None]).sum(-1).mean(dim=(0, 2))
        rows = cross[cross["layer"] == layer]
        np.testing.assert_allclose(rows["relevant"], read.numpy(), atol=1e-6)
        np.testing.assert_allclose(rows["sink"], steps[..., 0].mean(dim=(0, 2)).numpy(), atol=1e-6)
    # The encoder's examples come before those of the steps.
    assert list(probe.examples()["tokens"][:4]) == [9, 6, 3, 1]


def test_the_encoder_of_a_speech_model_counts_too():
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 60, "num_mel_bins": 4}
    ids = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config: Any = transformers.WhisperConfig(**sides, **sizes, **ids, max_source_positions=10, max_target_positions=20)
    torch.manual_seed(0)
    model: Any = transformers.WhisperForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    with torch.no_grad(), AttentionProbe(model, measures=["entropy"]) as probe:
        model.generate(torch.randn(2, 4, 20), max_new_tokens=3)
    table = probe.table()
    assert list(table["stack"].unique()) == ["encoder", "decoder", "decoder cross"]
    assert set(table[table["stack"] == "encoder"]["queries"]) == {2 * 10}
    # A mask of the 20 frames that hides none of them says nothing of the 10 positions that the encoder makes of them.
    frames, first = torch.randn(2, 4, 20), torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad(), AttentionProbe(model, measures=["entropy"]) as probe:
        model(frames, attention_mask=torch.ones(2, 20), decoder_input_ids=first)
    assert set(probe.table()["queries"]) == {20, 2}


def test_the_encoder_that_is_called_inside_the_model_is_no_call_of_its_own():
    model = bart().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(IDS, attention_mask=RIGHT.long(), decoder_input_ids=IDS[:, :2])
    assert set(probe.table()["queries"]) == {18, 6}
    assert len(probe.examples()) == 3
