"""Models for the measures from folders, objects and checkpoints, and one clear line for what is none."""

from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import SingleLayerModel, load_model
from qkov.analyses.attention.models.transformers import (
    TransformersCausalLM,
    TransformersClassifier,
    TransformersMaskedLM,
)
from qkov.analyses.dynamics import Parameterization, Setting, SingleLayerAttention
from qkov.circuits import AttentionWeights, CallError, QkovError
from qkov.circuits.reading.saved_format import save_checkpoint
from tokenizers import Tokenizer, models

from .tiny_models import CAUSAL, CLASSIFIERS, MASK, MASKED, VOCABULARY, small

EXAMPLE = torch.tensor([[9, 10, 11, 12]])
SHOWN = torch.ones(1, 4, dtype=torch.bool)


def save_tokenizer(folder: Any) -> None:
    vocabulary = {f"t{number}": number for number in range(VOCABULARY) if number != MASK} | {"[MASK]": MASK}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", mask_token="[MASK]").save_pretrained(
        folder
    )


@pytest.mark.parametrize(
    ("tiny", "kind"),
    [(CLASSIFIERS[0], TransformersClassifier), (CAUSAL[1], TransformersCausalLM), (MASKED[0], TransformersMaskedLM)],
    ids=["classifier", "causal", "masked"],
)
def test_a_folder_is_the_model_that_was_saved(tiny, kind, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    found = load_model(tmp_path)
    assert isinstance(found, kind)
    assert (found.name, found.mask_token) == (str(tmp_path), MASK)
    with torch.no_grad():
        wanted = model(input_ids=EXAMPLE).logits
    torch.testing.assert_close(found.logits(EXAMPLE, SHOWN), wanted, rtol=1e-5, atol=1e-5)
    assert load_model(found) is found


def test_an_object_is_told_by_its_class_or_by_what_is_said():
    assert isinstance(load_model(CLASSIFIERS[0].build()), TransformersClassifier)
    assert isinstance(load_model(CAUSAL[0].build()), TransformersCausalLM)
    assert isinstance(load_model(MASKED[0].build(), mask_token=MASK), TransformersMaskedLM)

    class Renamed(transformers.LlamaForCausalLM):
        pass

    model = Renamed(small("LlamaConfig"))
    assert isinstance(load_model(model, "causal"), TransformersCausalLM)
    with pytest.raises(CallError, match=r"class: Renamed\); give its kind: classifier, causal, masked"):
        load_model(model)
    with pytest.raises(CallError, match="give the id of that token as mask_token"):
        load_model(MASKED[0].build())


def test_a_folder_without_the_weights_of_a_head_is_refused_rather_than_read_with_random_ones(tmp_path):
    transformers.BertModel(small("BertConfig")).save_pretrained(tmp_path)
    with pytest.raises(CallError, match=r"class: BertModel\); give its kind"):
        load_model(tmp_path)
    with pytest.raises(
        QkovError, match="lacks 2 weights of a classifier model, which would be random, such as classifier"
    ):
        load_model(tmp_path, "classifier")


def test_a_folder_with_an_encoder_and_a_decoder_is_refused(tmp_path):
    config = transformers.T5Config(d_model=48, num_heads=4, num_layers=2, d_kv=12, vocab_size=VOCABULARY)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(CallError, match="has an encoder and a decoder"):
        load_model(tmp_path)


def test_a_run_of_a_reproduction_is_read_at_its_last_step(tmp_path):
    settings = {"parameterization": "CACO", "setting": vars(Setting(M=2, b=2, m=1, n=2))}
    for step in (3, 12):
        weights = AttentionWeights(0, W_QK=torch.eye(5)[None] * step, W_OV=torch.ones(1, 2, 5))
        save_checkpoint(tmp_path, step, [weights], {}, settings)
    found = load_model(tmp_path)
    assert isinstance(found, SingleLayerModel)
    assert found.attention_weights()[0].W_QK[0, 0, 0] == 12
    first = load_model(tmp_path / "step_000000003.safetensors")
    assert first.attention_weights()[0].W_QK[0, 0, 0] == 3


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "nobody/nothing-of-this-name",
            QkovError,
            "nobody/nothing-of-this-name cannot be read as a model of transformers ",
        ),
        (
            3,
            CallError,
            "TransformerLens' hooks, a torch.nn.Module with attention, or an address, got int",
        ),
        (
            SingleLayerAttention(3, 2, Parameterization.CACO),
            CallError,
            r"needs the vectors of its tokens: SingleLayerModel\(model, embedding\)",
        ),
    ],
    ids=["hub", "number", "single layer"],
)
def test_what_is_no_model_is_refused_in_one_line(source, error, message):
    with pytest.raises(error, match=message) as caught:
        load_model(source)
    assert "\n" not in str(caught.value)


def test_files_and_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(CallError, match=r"has no config\.json and no step_"):
        load_model(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(CallError, match=r"a\.txt is a file; expected a folder that transformers saved, a \.gguf file"):
        load_model(tmp_path / "a.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(QkovError, match="cannot be read as a model of transformers"):
        load_model(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"no")
    with pytest.raises(QkovError, match=r"weights\.safetensors"):
        load_model(tmp_path / "weights.safetensors")


def test_folded_weights_saved_by_others_are_no_checkpoint_of_ours(tmp_path):
    MASKED[0].build().save_pretrained(tmp_path)
    with pytest.raises(QkovError, match=r"is not a checkpoint that qkov saved; expected one of qkov reproduce"):
        load_model(tmp_path / "model.safetensors")
