"""A probe on models with TransformerLens' hooks: their cached patterns, their ways of being called, real models."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.circuits import CallError
from qkov.probes import AttentionProbe
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from ..analyses.test_transformer_lens_models import CHOSEN, bridge
from .plain_measures import assert_table, plain_measures

MASK = torch.arange(9) < torch.tensor([9, 6, 3])[:, None]
IDS = torch.randint(8, 50, (3, 9), generator=torch.Generator().manual_seed(1))
RELEVANT = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.4


def patterns(model: Any, **given: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        _, cache = model.run_with_cache(IDS, **given)
    return [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(2)]


@pytest.mark.parametrize("tiny", CHOSEN, ids=lambda tiny: tiny.name)
def test_every_measure_is_that_of_the_cached_patterns(tiny, tmp_path):
    model = bridge(tiny.build(), tmp_path)
    maps = patterns(model, attention_mask=MASK.long())
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        model(IDS, attention_mask=MASK.long())
    assert_table(probe.table(), plain_measures(maps, MASK, RELEVANT))


def test_however_the_model_is_called_the_probe_sees_it_and_leaves_the_user_s_hooks(tmp_path):
    model, seen = bridge(CHOSEN[0].build(), tmp_path), []

    def ablate(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append(hook)
        return torch.zeros_like(pattern)

    with torch.no_grad():
        probe, plain = AttentionProbe(model), model(IDS)
        with probe:
            model.run_with_cache(IDS)
            model.reset_hooks()
            ablated = model.run_with_hooks(IDS, fwd_hooks=[("blocks.0.attn.hook_pattern", ablate)])
            with AttentionProbe(model) as other, model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", ablate)]):
                model(IDS)
            again = model(IDS)
    assert len(seen) == 2
    assert torch.equal(plain, again)
    assert not torch.allclose(plain, ablated)
    # Maps are read as the user's hooks left them, whenever these were added; an ablated head attends to nothing.
    assert set(probe.table()["queries"]) == {3 * 27}
    assert other.table().groupby("layer")["queries"].first().to_dict() == {0: 27, 1: 0}
    points = [block.attn.hook_pattern for block in model.blocks]
    assert not any(point._forward_hooks for point in points)
    assert "forward" not in model.__dict__


def test_gradients_through_the_bridge_are_the_same_to_the_bit(tmp_path):
    def run(probed: bool, folder: Path) -> list[torch.Tensor]:
        model = bridge(CHOSEN[0].build(), folder)
        if probed:
            with AttentionProbe(model, relevant=RELEVANT):
                logits = model(IDS)
        else:
            logits = model(IDS)
        logits.square().mean().backward()
        return [logits, *[parameter.grad for parameter in model.parameters() if parameter.grad is not None]]

    plain, probed = run(False, tmp_path / "plain"), run(True, tmp_path / "probed")
    assert len(plain) == len(probed) > 10
    assert all(torch.equal(one, other) for one, other in zip(plain, probed, strict=True))


def test_texts_whose_padding_nobody_tells_are_refused(tmp_path):
    model = bridge(CHOSEN[0].build(), tmp_path)
    with (
        pytest.raises(CallError, match="called with 2 texts, and nothing shows where they were padded"),
        torch.no_grad(),
        AttentionProbe(model),
    ):
        model(["a", "a a a"], prepend_bos=False)


def test_a_forward_that_stops_early_gives_the_layers_that_ran(tmp_path):
    model = bridge(CHOSEN[0].build(), tmp_path)
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        model(IDS, stop_at_layer=1)
        model(IDS, stop_at_layer=0)
    assert set(probe.table()["layer"]) == {0}
    assert probe.examples()["rollout"].isna().all()


def test_the_model_of_transformer_lens_own_is_watched_too():
    options = {"d_model": 24, "d_head": 8, "n_heads": 3, "n_layers": 2, "n_ctx": 16, "d_vocab": 50, "act_fn": "gelu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = TransformerBridge
        model = made.boot_native(TransformerBridgeConfig(**options, architecture="TransformerLensNative"))
    with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
        model(IDS)
    assert_table(probe.table(), plain_measures(patterns(model), torch.ones_like(MASK), RELEVANT))


def saturated(model: Any) -> Any:
    """The same model with scores so large that many weights are exactly 0."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query" in name or ".q." in name:
                weight.mul_(3e3)
    return model


def test_what_a_query_can_see_is_told_by_the_layer_where_weights_are_0(tmp_path):
    options = {"d_model": 24, "d_head": 8, "n_heads": 3, "n_layers": 2, "n_ctx": 16, "d_vocab": 50, "act_fn": "gelu"}
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    encoder = transformers.BertForMaskedLM._from_config(
        transformers.BertConfig(vocab_size=50, **sizes), attn_implementation="eager"
    )
    encoder.save_pretrained(tmp_path)
    made: Any = TransformerBridge
    for causal in (True, False):
        if causal:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = made.boot_native(TransformerBridgeConfig(**options, architecture="TransformerLensNative"))
        else:
            model = boot(tmp_path, encoder)
        saturated(model).eval()
        maps = patterns(model, attention_mask=MASK.long())
        assert (maps[0][0, :, [0, -1]] == 0).any()
        with torch.no_grad(), AttentionProbe(model, relevant=RELEVANT) as probe:
            model(IDS, attention_mask=MASK.long())
        wanted = plain_measures(maps, MASK, RELEVANT, causal=causal)
        for name in ("chance", "chance_at_readout"):
            np.testing.assert_allclose(probe.table()[name], wanted[name].flatten(), rtol=0, atol=1e-6)


def agree(one: AttentionProbe, other: AttentionProbe) -> None:
    ours, theirs = (probe.table().drop(columns="hook", errors="ignore") for probe in (one, other))
    assert list(ours) == list(theirs)
    np.testing.assert_allclose(ours.to_numpy(dtype=float), theirs.to_numpy(dtype=float), rtol=0, atol=1e-5)
    rolled = [probe.examples()["rollout"].to_numpy(dtype=float) for probe in (one, other)]
    np.testing.assert_allclose(*rolled, rtol=0, atol=1e-5)


def boot(folder: Path, model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerBridge.boot_transformers(str(folder), hf_model=model, device="cpu").eval()


def test_minilm_measures_the_same_as_a_bridge_and_as_a_model_of_transformers(minilm):
    tokens = torch.randint(1000, 20000, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(24) < torch.tensor([24, 15])[:, None]
    relevant = torch.arange(24) % 5 == 1
    load = transformers.BertForMaskedLM.from_pretrained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = load(minilm, attn_implementation="eager")
        bridged = boot(minilm, load(minilm, attn_implementation="eager"))
    probes = []
    for model, name in ((plain.eval(), "input_ids"), (bridged, "input")):
        with torch.no_grad(), AttentionProbe(model, relevant=relevant, readout="first") as probe:
            model(**{name: tokens}, attention_mask=mask.long())
        probes.append(probe)
    agree(*probes)
    with torch.no_grad():
        maps = list(plain(tokens, attention_mask=mask.long(), output_attentions=True).attentions)
    wanted = plain_measures(maps, mask, relevant.expand(2, 24), causal=False, readout=[0, 0])
    assert_table(probes[0].table(), wanted, 2e-6)


def test_smollm2_measures_the_same_as_a_bridge_and_as_a_model_of_transformers(smollm2, smollm2_tokeniser, tmp_path):
    tokeniser = transformers.AutoTokenizer.from_pretrained(smollm2_tokeniser)
    given = tokeniser("The keys to the cabinet that the owners of the house like", return_tensors="pt")
    tokens, relevant = given["input_ids"], torch.zeros(given["input_ids"].shape[1], dtype=torch.bool)
    relevant[1] = True

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            smollm2, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    folder = tmp_path / "model"
    shutil.copytree(smollm2_tokeniser, folder)
    shutil.copy(smollm2 / "config.json", folder)
    probes = []
    for model in (load(), boot(folder, load())):
        with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
            model(tokens)
        probes.append(probe)
    agree(*probes)
