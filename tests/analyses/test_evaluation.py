"""Evaluation mode and eager attention for the time of a call: every module and config is as it was afterwards."""

from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention.maps.evaluation import eager_attention, evaluation_mode
from torch import nn

from .tiny_models import small


class Merging(nn.Module):
    """A layer that does more than set a flag when its mode changes, as some adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_every_module_has_its_own_mode_back(error):
    frozen, merging = nn.Dropout().eval(), Merging()
    model = nn.Sequential(frozen, merging, nn.Linear(2, 2)).train()
    frozen.eval()
    before = [module.training for module in model.modules()]
    try:
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            assert merging.merged
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert [module.training for module in model.modules()] == before == [True, False, True, True]
    assert not merging.merged


def test_a_part_that_trains_in_a_model_that_does_not_is_left_so():
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval()
    model[0].train()
    with evaluation_mode(model):
        assert not model[0].training
    assert [module.training for module in model.modules()] == [False, True, False]


def test_every_config_has_its_own_implementation_back():
    torch.manual_seed(0)
    side: Any = small("BertConfig", attn_implementation="sdpa")
    other: Any = small("BertConfig", attn_implementation="eager", is_decoder=True, add_cross_attention=True)
    parts = {"encoder": transformers.BertModel(side), "decoder": transformers.BertLMHeadModel(other)}
    model: Any = transformers.EncoderDecoderModel(**parts)

    def kinds() -> list[str]:
        configs = (model.config, model.config.encoder, model.config.decoder, model.encoder.config, model.decoder.config)
        return [config._attn_implementation for config in configs]

    before = kinds()
    assert {"sdpa", "eager"} <= set(before)
    with eager_attention(model) as fused:
        assert fused is None
        assert set(kinds()) == {"eager"}
    assert kinds() == before
    with pytest.raises(KeyboardInterrupt), eager_attention(model):
        raise KeyboardInterrupt
    assert kinds() == before


def test_a_model_that_is_eager_or_has_no_attention_is_not_touched():
    model = transformers.BertModel(small("BertConfig", attn_implementation="eager"))
    for untouched in (model, nn.Linear(2, 2)):
        with eager_attention(untouched) as fused:
            assert fused is None
    assert model.config._attn_implementation == "eager"
