"""What a probe measures, over which tokens, against plain loops; and that it leaves nothing behind."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.attention import Rollout
from qkov.analyses.attention.maps.calls import _Method
from qkov.circuits import CallError
from qkov.probes import AttentionProbe

from ..analyses.tiny_models import Tiny, gpt2, small
from .plain_measures import assert_table, plain_measures, plain_rollout

LENGTHS = (9, 6, 3)


def causal_model() -> Any:
    model = Tiny("GPT2LMHeadModel", lambda: gpt2(attn_implementation="eager"), "").build()
    model.set_attn_implementation("eager")
    return model


def encoder() -> Any:
    model = Tiny("BertModel", lambda: small("BertConfig"), "").build()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def model() -> Any:
    return causal_model()


def tokens() -> torch.Tensor:
    return torch.randint(8, 50, (3, 9), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return mask if side == "right" else mask.flip(1)


def relevance() -> torch.Tensor:
    return torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.4


def maps_of(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    with torch.no_grad():
        given = {} if mask is None else {"attention_mask": mask.long()}
        return list(model(ids, **given, output_attentions=True).attentions)


def hooks_of(model: torch.nn.Module) -> int:
    own = "forward" in model.__dict__
    return own + sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("causal", [True, False])
def test_every_measure_is_that_of_plain_loops(side, causal):
    model = causal_model() if causal else encoder()
    ids, mask, relevant = tokens(), padding(side), relevance()
    with AttentionProbe(model, relevant=relevant) as probe:
        model(ids, attention_mask=mask.long())
    maps = maps_of(model, ids, mask)
    table = probe.table()
    assert_table(table, plain_measures(maps, mask, relevant, causal=causal))
    assert list(table["layer"]) == [0] * 4 + [1] * 4
    assert list(table["head"]) == [0, 1, 2, 3] * 2
    assert set(table["queries"]) == {sum(LENGTHS)}
    assert table["finite"].all()
    examples = probe.examples()
    last = [8, 5, 2] if side == "right" else [8, 8, 8]
    assert list(examples["readout"]) == last
    assert list(examples["tokens"]) == list(LENGTHS)
    assert list(examples["relevant"]) == (relevant & mask).sum(1).tolist()
    rolled = plain_rollout(maps, mask, last)
    # NaN for an example without a relevant token, which the shortest one is where padding is on the left.
    known = torch.where((relevant & mask).any(1), 1.0, torch.nan)
    assert int(known.isnan().sum()) == (side == "left")
    np.testing.assert_allclose(examples["rollout"], ((rolled * relevant).sum(1) * known).numpy(), atol=1e-6)
    np.testing.assert_allclose(examples["chance"], ((relevant & mask).sum(1) / mask.sum(1) * known).numpy(), atol=1e-6)
    by_head = probe.examples(by_head=True)
    read = torch.stack([given[torch.arange(3), :, last] for given in maps], dim=1)
    wanted = (read * (relevant & mask)[:, None, None]).sum(-1) * known[:, None, None]
    np.testing.assert_allclose(by_head["attention"], wanted.flatten().numpy(), atol=1e-6)
    np.testing.assert_allclose(examples["attention"], wanted.mean(dim=(1, 2)).numpy(), atol=1e-6)


def test_batches_add_up_to_one_and_reset_forgets(model):
    ids, mask, relevant = tokens(), padding("right"), relevance()
    with AttentionProbe(model, relevant=relevant) as whole:
        model(ids, attention_mask=mask.long())
    probe = AttentionProbe(model)
    for row, length in enumerate(LENGTHS):
        probe.relevant = relevant[row, :length]
        with probe:
            model(ids[row : row + 1, :length])
    columns = [name for name in whole.table() if name != "finite"]
    np.testing.assert_allclose(probe.table()[columns], whole.table()[columns], atol=1e-6)
    np.testing.assert_allclose(probe.examples()["rollout"], whole.examples()["rollout"], atol=1e-6)
    probe.reset()
    with pytest.raises(CallError, match="nothing was measured; call GPT2LMHeadModel inside"):
        probe.table()


def test_examples_of_several_calls_are_numbered_through(model):
    ids, relevant = tokens(), torch.arange(9) % 3 == 1
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        model(ids)
        model(ids[1:])
    read = torch.stack(maps_of(model, ids, None), dim=1)[[0, 1, 2, 1, 2], :, :, 8]
    by_head = probe.examples(by_head=True)
    places = np.array([(example, layer, head) for example in range(5) for layer in range(2) for head in range(4)])
    assert list(by_head) == ["example", "layer", "head", "attention"]
    np.testing.assert_array_equal(by_head[["example", "layer", "head"]], places)
    np.testing.assert_allclose(by_head["attention"], read[..., relevant].sum(-1).flatten(), atol=1e-6)
    assert list(probe.examples()["example"]) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(probe.examples()["attention"], read[..., relevant].sum(-1).mean((1, 2)), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_measured_as_their_maps_are(model, dtype):
    model, ids, relevant = model.to(dtype), tokens(), relevance()
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        model(ids)
    mask = torch.ones_like(relevant)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert_table(probe.table(), plain_measures(maps_of(model, ids, None), mask, relevant), tolerance)


def test_mixed_precision_around_the_model_does_not_round_the_measures(model):
    ids, relevant = tokens(), relevance()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), AttentionProbe(model, relevant=relevant) as probe:
        maps = list(model(ids, output_attentions=True).attentions)
    assert_table(probe.table(), plain_measures(maps, torch.ones_like(relevant), relevant))


def test_sliding_windows_bound_what_can_be_seen():
    model = Tiny("MistralForCausalLM", lambda: small("MistralConfig", num_key_value_heads=2, sliding_window=3), "")
    model = model.build()
    model.set_attn_implementation("eager")
    ids, relevant = tokens(), relevance()
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        model(ids)
    wanted = plain_measures(maps_of(model, ids, None), torch.ones_like(relevant), relevant, window=3)
    assert_table(probe.table(), wanted)


def test_queries_readout_and_masks_are_given_in_several_ways(model):
    ids, mask, relevant = tokens(), padding("right"), relevance()
    maps = maps_of(model, ids, mask)
    asked = torch.arange(9) % 2 == 0
    with AttentionProbe(
        model, relevant=lambda given: given > 20, mask=mask, queries=asked, readout=torch.tensor([4, 0, 1])
    ) as probe:
        model(ids, attention_mask=mask.long())
    wanted = plain_measures(maps, mask, ids > 20, asked=asked.expand(3, 9), readout=[4, 0, 1])
    assert_table(probe.table(), wanted)
    # Of the tokens up to the one at which attention is read.
    shares = [((ids > 20) & mask)[row, : at + 1].double().mean() for row, at in enumerate([4, 0, 1])]
    np.testing.assert_allclose(probe.examples()["chance"], shares, atol=1e-6)
    with AttentionProbe(model, relevant=relevant.long().tolist(), queries="last", readout="first") as probe:
        model(ids, attention_mask=mask.long())
    last = torch.arange(9) == torch.tensor([8, 5, 2])[:, None]
    assert_table(probe.table(), plain_measures(maps, mask, relevant, asked=last, readout=[0, 0, 0]))


def test_there_is_nothing_to_read_at_padding(model):
    ids, mask, relevant = tokens(), padding("right"), torch.arange(9) < 2
    with torch.no_grad(), AttentionProbe(model, relevant=relevant, readout=torch.tensor([8, 8, 8])) as probe:
        model(ids, attention_mask=mask.long())
    examples, maps = probe.examples(), maps_of(model, ids, mask)
    assert examples[["rollout", "chance", "attention"]][1:].isna().all(axis=None)
    assert list(examples["relevant"]) == [2, 2, 2]
    rolled = plain_rollout([attention[:1] for attention in maps], mask[:1], [8])[0, :2].sum()
    np.testing.assert_allclose(examples["rollout"][0], rolled, atol=1e-6)
    np.testing.assert_allclose(examples["chance"][0], 2 / 9, atol=1e-6)
    read = torch.stack(maps, dim=1)[0, :, :, 8, :2].sum(dim=-1)
    np.testing.assert_allclose(probe.table()["relevant_at_readout"], read.flatten(), atol=1e-6)
    np.testing.assert_allclose(examples["attention"][0], read.mean(), atol=1e-6)


def test_a_mask_for_the_probe_alone_brings_rows_to_sum_1_over_the_tokens():
    model, ids, mask, relevant = encoder(), tokens(), padding("right"), relevance()
    with AttentionProbe(model, relevant=relevant, mask=mask) as probe:
        model(ids)
    assert_table(probe.table(), plain_measures(maps_of(model, ids, None), mask, relevant, causal=False))


def test_rollout_has_the_settings_asked_for_and_whole_rows(model):
    ids, mask = tokens(), padding("right")
    with AttentionProbe(model, rollout=Rollout(residual=0.2), rollout_rows=True, measures=["rollout"]) as probe:
        model(ids, attention_mask=mask.long())
    wanted = plain_rollout(maps_of(model, ids, mask), mask, [8, 5, 2], residual=0.2)
    torch.testing.assert_close(torch.stack(probe.rollout_rows).double(), wanted, rtol=0, atol=1e-6)
    assert bool(probe.examples()["rollout"].isna().all())
    assert "entropy" not in probe.table()


def test_maps_asked_for_are_those_of_the_model(model):
    ids = tokens()
    with AttentionProbe(model, maps={(0, 1), (1, 3)}) as probe:
        model(ids)
        model(ids[:1, :4])
    found, maps = probe.maps, maps_of(model, ids, None)
    assert list(found) == [(0, 1), (1, 3)]
    for layer, head in ((0, 1), (1, 3)):
        kept = found[layer, head]
        assert [tuple(given.shape) for given in kept] == [(3, 9, 9), (1, 4, 4)]
        torch.testing.assert_close(kept[0], maps[layer][:, head], rtol=0, atol=0)
    with AttentionProbe(model, maps="all") as probe:
        model(ids)
    assert len(probe.maps) == 8


def test_cached_keys_are_seen_and_rollout_is_left_out(model):
    ids = tokens()
    relevant = torch.arange(9) < 2
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
        probe = AttentionProbe(model, relevant=relevant, measures=["self", "previous", "sink", "relevant", "rollout"])
        with probe:
            model(ids[:, 6:], cache=cache)
    maps = maps_of(model, ids, None)
    late = (torch.arange(9) >= 6).expand(3, 9)
    wanted = plain_measures(maps, torch.ones(3, 9, dtype=torch.bool), relevant.expand(3, 9), asked=late)
    chosen = ("self", "previous", "sink", "relevant", "chance", "relevant_at_readout", "chance_at_readout")
    assert_table(probe.table(), {name: wanted[name] for name in chosen})
    assert set(probe.table()["queries"]) == {9}
    assert probe.examples()["rollout"].isna().all()
    assert set(probe.examples()["readout"]) == {8}


def test_generation_is_measured_step_by_step(model):
    with torch.no_grad(), AttentionProbe(model) as probe:
        model.generate(tokens()[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert set(probe.table()["queries"]) == {9 + 1 + 1}
    assert list(probe.examples()["tokens"]) == [9, 10, 11]


@pytest.mark.parametrize("count", [1, 9])
def test_a_head_that_is_not_finite_is_flagged_however_few_its_queries_are(model, count):
    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        attention = output[1].clone()
        attention[:, 2] = torch.nan
        return output[0], attention

    model.transformer.h[0].attn.register_forward_hook(spoil)
    with torch.no_grad(), AttentionProbe(model) as probe:
        model(tokens()[:1, :count])
    assert list(probe.table()["queries"]) == [count] * 8
    assert list(probe.table()["finite"]) == [True, True, False, *[True] * 5]


def test_a_head_that_is_not_finite_is_flagged_and_the_others_are_measured(model):
    ids, relevant = tokens(), relevance()

    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        attention = output[1].clone()
        attention[:, 2] = torch.nan
        return output[0], attention

    handle = model.transformer.h[0].attn.register_forward_hook(spoil)
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        model(ids)
    handle.remove()
    table = probe.table()
    assert list(table["finite"]) == [True, True, False, *[True] * 5]
    assert np.isnan(table[["entropy", "largest", "relevant", "self"]].to_numpy()[2]).all()
    wanted = plain_measures(maps_of(model, ids, None), torch.ones_like(relevant), relevant)
    others = table["head"].to_numpy() != 2
    np.testing.assert_allclose(table["entropy"][others], wanted["entropy"].flatten()[others], atol=1e-6)


def test_queries_that_dropout_left_without_keys_are_left_out():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(gpt2(attn_pdrop=0.5)).train()
    model.set_attn_implementation("eager")
    with AttentionProbe(model, measures=["sink", "entropy"]) as probe:
        maps = list(model(tokens(), output_attentions=True).attentions)
    table = probe.table()
    attending = torch.stack([(given.sum(-1) > 0).sum(dim=(0, 2)) for given in maps]).flatten()
    assert list(table["queries"]) == attending.tolist()
    assert min(table["queries"]) < 27
    assert table["finite"].all()
    given = maps[0][:, 0].detach().double()
    kept = given.sum(-1) > 0
    assert abs(float(table["sink"].to_numpy()[0]) - float((given[..., 0] / given.sum(-1))[kept].mean())) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relevant": torch.ones(7)}, r"relevant has 7 positions, and the map of layer 0 has 9"),
        ({"relevant": torch.ones(2, 9)}, r"relevant has shape \[2, 9\]; expected \[position\], or \[batch, position\]"),
        ({"relevant": torch.full((9,), 0.5)}, "relevant has values other than 0 and 1"),
        ({"relevant": [[1, 0], [1]]}, r"relevant should be a tensor, or numbers .*, got list \(expected sequence of"),
        ({"relevant": lambda _tokens: None}, r"relevant should be a tensor, or numbers .*, got NoneType"),
        ({"mask": torch.ones(8)}, "the mask of the keys has 8 positions"),
        ({"queries": torch.ones(5)}, "queries has 5 positions"),
        ({"readout": torch.tensor([9, 0, 0])}, "one of 9 positions for each of 3 examples"),
        ({"maps": {(0, 4)}}, "the map of head 4 was asked for; layer 0 of GPT2LMHeadModel has heads 0 to 3"),
    ],
)
def test_what_does_not_fit_is_one_clear_error_and_earlier_calls_stay(model, options, message):
    probe = AttentionProbe(model, **({"relevant": torch.ones(9)} | options))
    with pytest.raises(CallError, match=message), probe:
        model(tokens())
    assert hooks_of(model) == 0
    with pytest.raises(CallError, match="nothing was measured"):
        probe.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": ["entropie"]}, "measures should be some of entropy, relevant"),
        ({"queries": "some"}, "queries should be 'all', 'last' or a mask"),
        ({"maps": {(5, 0)}}, r"the map \(5, 0\) was asked for; GPT2LMHeadModel has the layers 0, 1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(model, options, message):
    with pytest.raises(CallError, match=message):
        AttentionProbe(model, **options)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_breaks_off_leaves_what_was_there(model, error):
    ids = tokens()
    broken = model.transformer.h[1].mlp
    with AttentionProbe(model) as probe:
        model(ids)
        before = probe.table()

        def interrupt(*_args: Any) -> None:
            raise error

        handle = broken.register_forward_hook(interrupt)
        with pytest.raises(error):
            model(ids)
        handle.remove()
        after = probe.table()
        assert after[list(before)].equals(before)
        assert after["partial"].str.startswith("1 call ").all()
        model(ids)
    assert (probe.table()["queries"] == 2 * before["queries"]).all()
    assert hooks_of(model) == 0
    with pytest.raises(error), AttentionProbe(model):
        raise error
    assert hooks_of(model) == 0


@pytest.mark.parametrize("moment", ["put", "take_away"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_interrupts_while_watching_begins_and_ends_leave_nothing(model, monkeypatch, moment, number):
    kinds = {type(module) for module in model.modules()}
    own = {kind: (kind.forward, kind.__call__) for kind in kinds}
    real, calls = getattr(_Method, moment), []

    def interrupted(method: _Method) -> None:
        real(method)
        calls.append(method)
        if len(calls) == number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Method, moment, interrupted)
        with pytest.raises(KeyboardInterrupt), AttentionProbe(model):
            pass
    assert hooks_of(model) == 0
    assert own == {kind: (kind.forward, kind.__call__) for kind in kinds}
    with AttentionProbe(model) as probe:
        model(tokens())
    assert set(probe.table()["queries"]) == {27}


def test_several_probes_and_the_user_s_hooks_go_together_in_any_order(model):
    ids, seen = tokens(), []
    handle = model.transformer.h[0].attn.register_forward_hook(lambda *_given: seen.append(1))
    first, second = AttentionProbe(model), AttentionProbe(model, measures=["sink"])
    first.__enter__()
    second.__enter__()
    model(ids)
    first.__exit__(None, None, None)
    model(ids)
    second.__exit__(None, None, None)
    model(ids)
    assert len(seen) == 3
    assert set(first.table()["queries"]) == {27}
    assert set(second.table()["queries"]) == {54}
    np.testing.assert_allclose(first.table()["sink"], second.table()["sink"], atol=1e-12)
    handle.remove()
    assert hooks_of(model) == 0
    with first, pytest.raises(CallError, match="already watching"), first:
        pass


@pytest.mark.parametrize("checkpointing", [False, True])
def test_outputs_random_numbers_and_gradients_stay_to_the_bit(checkpointing):
    def run(probed: bool) -> tuple[list[torch.Tensor], AttentionProbe]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(gpt2()).train()
        model.set_attn_implementation("eager")
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        probe, ids = AttentionProbe(model, relevant=relevance(), maps="all"), tokens()
        if probed:
            probe.__enter__()
        torch.manual_seed(1)
        output = model(ids, labels=ids, use_cache=False)
        output.loss.backward()
        found = [output.logits, output.loss, torch.rand(3), *[parameter.grad for parameter in model.parameters()]]
        if probed:
            probe.__exit__(None, None, None)
        return found, probe

    plain, _ = run(False)
    probed, probe = run(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, probed, strict=True))
    # What the backward pass computes again does not count.
    assert probe.table()["queries"].max() <= 27


def test_a_thousand_uses_leave_nothing_behind():
    # In a process of its own: what checks annotations in the tests keeps memory itself.
    command = [sys.executable, "-m", "tests.probes.thousand_uses"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    left = json.loads(found)
    assert left["hooks"] == 0
    assert left["maps"] == 0
    assert left["objects"] <= 5
    assert left["bytes"] < 20_000


def test_the_forward_that_an_instance_has_of_its_own_is_given_back(model):
    inner, calls = model.forward, []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = own
    with AttentionProbe(model) as probe:
        model(input_ids=tokens())
    assert model.forward is own
    assert calls == [1]
    assert set(probe.table()["queries"]) == {27}


def test_what_wraps_the_forward_meanwhile_stays(model):
    first, second = AttentionProbe(model), AttentionProbe(model)
    first.__enter__()
    watched = model.forward

    @functools.wraps(watched)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return watched(*args, **kwargs)

    model.forward = wrapped
    with second:
        model(tokens())
    assert model.forward is wrapped
    first.__exit__(None, None, None)
    assert model.forward is wrapped
    model(tokens())
    assert set(first.table()["queries"]) == set(second.table()["queries"]) == {27}


def test_calls_in_inference_mode_and_outside_of_it_add_up(model):
    ids, relevant = tokens(), relevance()
    with AttentionProbe(model, relevant=relevant) as probe:
        model(ids)
        once = probe.table()
        with torch.inference_mode():
            model(ids)
    twice = probe.table()
    assert (twice["queries"] == 2 * once["queries"]).all()
    np.testing.assert_allclose(twice.iloc[:, 3:-1], once.iloc[:, 3:-1], atol=1e-6)


def test_a_mask_of_queries_and_keys_says_what_is_padding(model):
    ids, mask, relevant = tokens(), padding("right"), relevance()
    shown = mask[:, None, None] & torch.ones(9, 9).tril().bool()
    whole = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    with torch.no_grad(), AttentionProbe(model, relevant=relevant) as probe:
        model(ids, attention_mask=whole)
    wanted = plain_measures(maps_of(model, ids, mask), mask, relevant)
    assert_table(probe.table(), wanted)
    with torch.no_grad(), AttentionProbe(model, mask=mask, relevant=relevant) as probe:
        model(ids, attention_mask=whole)
    assert_table(probe.table(), wanted)


def test_nothing_but_maps_can_be_asked_for(model):
    with torch.no_grad(), AttentionProbe(model, measures=[], maps={(1, 0)}) as probe:
        model(tokens()[:1])
    assert list(probe.table()) == ["layer", "head", "queries", "finite"]
    assert [axes.get_title() for axes in probe.figure().axes if axes.get_title()] == ["layer 1, head 0"]
    assert "<svg" in probe._repr_html_()


def test_the_figure_and_the_page_show_every_measure_and_no_markup_of_tokens(model):
    ids = tokens()[:1]
    labels = [f"<b>{number}$" for number in range(9)]
    with torch.no_grad(), AttentionProbe(model, relevant=relevance()[:1], maps={(0, 1)}, tokens=labels) as probe:
        model(ids)
    titles = [axes.get_title() for axes in probe.figure().axes if axes.get_title()]
    assert titles[:2] == ["entropy", "largest"]
    assert "next" not in titles
    assert titles[-1] == "layer 0, head 1"
    assert titles[2].startswith("relevant\nchance 0.")
    shown = probe.figure(["sink"])
    assert getattr(shown, "_repr_png_")().startswith(b"\x89PNG")  # noqa: B009 (what a notebook asks for)
    drawn = shown.axes[0].images[0].get_array()
    np.testing.assert_allclose(np.asarray(drawn), probe.table()["sink"].to_numpy().reshape(2, 4))
    page = probe._repr_html_()
    assert page.count("<svg") == 1
    assert "<b>0" not in page
    assert f"{probe.table()['entropy'][3]:.3f}" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "nothing was measured" in AttentionProbe(model)._repr_html_()
    with pytest.raises(CallError, match=r"measures should be some of entropy, .*which the table has"):
        probe.figure(["nothing"])
    probe.tokens = labels[:3]
    with pytest.raises(CallError, match="3 labels of tokens were given for a map of 9 keys"):
        probe.figure()
    assert "3 labels of tokens were given" in probe._repr_html_()
