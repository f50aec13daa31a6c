"""A guard keeps the largest score of each head under a limit: what it does to each entry, and what that holds."""

import copy
import itertools
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.circuits import CallError, QkovError
from qkov.probes import AttentionHealth, AttentionProbe, CircuitProbe, CircuitRates
from torch import Tensor, nn

from ..circuits.family_proof import small
from .fused_models import BY_NAME, HEADS, VOCABULARY, batches, loss_of

ROOT = Path(__file__).parents[2]
LR = 0.01


def largest_scores(model: Any, tokens: Tensor) -> dict[tuple[int, int], float]:
    """By the probe, whose scores are those of plain products."""
    with torch.no_grad(), AttentionProbe(model, measures=["max_logit"]) as probe:
        model(tokens)
    table = probe.table()
    return {(row.layer, row.head): row.max_logit for row in table.itertuples()}  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


def enlarged(model: Any, factor: float) -> Any:
    """The model with scores that are larger by about the square of a factor."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("c_attn", "query_key_value", "qkv_proj", "q_proj", "k_proj")):
                parameter.mul_(factor)
    return model.double()


def step(model: Any, optimizer: Any, tokens: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    optimizer.step()


def by_head(places: list[int], heads: int) -> list[list[int]]:
    size = len(places) // heads
    return [places[head * size : (head + 1) * size] for head in range(heads)]


def rows_of_heads(fused: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of W_Q of each head, and those of each key that heads share."""
    query, key, _ = fused.places
    d_head = len(query) // HEADS
    return by_head(query, HEADS), by_head(key, len(key) // d_head)


def braked(score: float, limit: float) -> float:
    return 1.0 if score <= limit / 10 else min(1.0, max(0.0, math.log(limit / score) / math.log(10)))


NAMES = ["GPT-2", "GPT-NeoX", "Phi-3, grouped heads", "Falcon, grouped heads", "nanoGPT"]


@pytest.mark.parametrize("qk", [1.0, 5.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_each_head_is_taken_at_the_rate_that_its_score_leaves(name, qk):
    """Plain gradient descent, in numpy; a shared key has the lowest rate of its heads, and biases belong to it."""
    fused = BY_NAME[name]
    model = enlarged(fused.model(torch.float64), 2.0)
    tokens = next(batches(1))
    scores = largest_scores(model, tokens)
    # Some heads are below the brake's start, some within it, some above the limit.
    limit = 3.0 * float(np.median(list(scores.values())))
    scores_in_order = sorted(scores.values())
    limit = scores_in_order[-1] / 1.01
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss_of(model, tokens).backward()
    before = {key: parameter.detach().numpy().copy() for key, parameter in model.named_parameters()}
    gradients = {key: parameter.grad.numpy().copy() for key, parameter in model.named_parameters()}
    optimizer.zero_grad()
    queries, keys = rows_of_heads(fused)
    with CircuitRates(optimizer, model, qk=qk, guard=limit, **dict(fused.options)) as rates:
        step(model, optimizer, tokens)
    lowered = []
    for layer in range(fused.layers):
        multiples = [braked(scores[layer, head], limit) for head in range(HEADS)]
        lowered += multiples
        weight = fused.projection.format(layer=layer)
        for parameter, own in ((weight, qk), (weight.replace("weight", "bias"), 1.0)):
            if parameter not in before:
                continue
            axis = fused.dimension if parameter == weight else 0
            scale = np.ones(before[parameter].shape[axis])
            for head, rows in enumerate(queries):
                scale[rows] = own * multiples[head]
            size = HEADS // len(keys)
            for key, rows in enumerate(keys):
                scale[rows] = own * min(multiples[key * size : (key + 1) * size])
            shaped = scale[:, None] if axis == 0 and before[parameter].ndim == 2 else scale
            gradients[parameter] *= shaped
    assert min(lowered) == 0
    assert max(lowered) > 0.05
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(
            parameter.detach(), before[key] - LR * gradients[key], rtol=0, atol=1e-13, err_msg=key
        )
    table = rates.guard.table()
    np.testing.assert_allclose(table["rate"], lowered, atol=1e-9)
    assert table["clip"].eq(1).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_scales_what_each_head_has_of_its_own(name):
    fused = BY_NAME[name]
    model = enlarged(fused.model(torch.float64), 2.0)
    tokens = next(batches(1))
    scores = largest_scores(model, tokens)
    limit = float(np.median(list(scores.values())))
    plain = copy.deepcopy(model)
    step(plain, torch.optim.SGD(plain.parameters(), lr=LR), tokens)
    expected = {key: parameter.detach().numpy().copy() for key, parameter in plain.named_parameters()}
    queries, keys = rows_of_heads(fused)
    is_grouped = len(keys) < HEADS
    factors = []
    for layer in range(fused.layers):
        weight = fused.projection.format(layer=layer)
        for head, rows in enumerate(queries):
            factor = min(1.0, limit / scores[layer, head])
            factors.append(factor)
            for parameter in (weight, weight.replace("weight", "bias")):
                if parameter in expected:
                    moved = np.moveaxis(expected[parameter], fused.dimension if parameter == weight else 0, 0)
                    moved[rows] *= factor if is_grouped else math.sqrt(factor)
                    if not is_grouped:
                        moved[keys[head]] *= math.sqrt(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with CircuitRates(optimizer, model, qk=1.0, guard=limit, guard_by="clip", **dict(fused.options)) as rates:
        step(model, optimizer, tokens)
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach(), expected[key], rtol=0, atol=1e-13, err_msg=key)
    table = rates.guard.table()
    np.testing.assert_allclose(table["clip"], factors, rtol=1e-9)
    assert table["clip"].lt(1).any()
    assert table["rate"].eq(1).all()


ONE_LAYER: dict[str, Any] = {
    "GPT-2": lambda: transformers.GPT2Config(
        n_embd=24, n_layer=1, n_head=4, vocab_size=VOCABULARY, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "rotary, grouped heads": lambda: small("LlamaConfig", num_hidden_layers=1, num_key_value_heads=2),
    "rotary in part": lambda: small("GPTNeoXConfig", hidden_size=32, num_hidden_layers=1),
    "ALiBi": lambda: small("FalconConfig", num_hidden_layers=1, alibi=True, multi_query=False),
}


@pytest.mark.parametrize("name", ONE_LAYER)
def test_a_clip_brings_the_scores_of_the_same_batch_to_the_limit_exactly(name):
    """In the first layer, if the step itself moves nothing; with biases and positions of every kind."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(ONE_LAYER[name](), attn_implementation="sdpa").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = next(batches(1))
    before = largest_scores(model, tokens)
    limit = float(np.median(list(before.values())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with CircuitRates(optimizer, model, qk=1.0, guard=limit, guard_by="clip"):
        step(model, optimizer, tokens)
    after = largest_scores(model, tokens)
    for head, score in before.items():
        # The model computes its norms in float32.
        assert math.isclose(after[head], min(score, limit), rel_tol=1e-6 if "rotary, " in name else 1e-12)
    assert max(before.values()) > limit * 1.01


def test_a_key_that_heads_share_keeps_the_scores_of_the_others():
    torch.manual_seed(0)
    config = small("LlamaConfig", num_hidden_layers=1, num_key_value_heads=2)
    model: Any = enlarged(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), 8.0)
    tokens = next(batches(1))
    before = largest_scores(model, tokens)
    first, *_, last = sorted(before, key=lambda head: before[head])
    limit = (sorted(before.values())[-2] + before[last]) / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with CircuitRates(optimizer, model, qk=1.0, guard=limit, guard_by="clip"):
        step(model, optimizer, tokens)
    after = largest_scores(model, tokens)
    for head, score in before.items():
        assert math.isclose(after[head], limit if head == last else score, rel_tol=1e-6)
    assert first != last


@pytest.mark.parametrize("guard_by", ["rate", "clip"])
@pytest.mark.parametrize("qk", [1.0, 30.0])
def test_training_is_the_same_to_the_bit_where_nothing_is_held(qk, guard_by):
    states = []
    for guard in ({}, {"guard": 1e9, "guard_by": guard_by}):
        model = BY_NAME["GPT-2"].model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with CircuitRates(optimizer, model, qk=qk, **guard):
            for tokens in batches(5):
                step(model, optimizer, tokens)
        states.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def trained_on_one_batch(steps: int, **guard: Any) -> list[float]:
    """The largest score of the first layer at each step, where W_Q and W_K alone are trained."""
    model = BY_NAME["GPT-2"].model(torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.0.attn.c_attn" in name)
    tokens = next(batches(1))
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.02)
    scores = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with CircuitRates(optimizer, model, qk=1.0, **guard):
            for _ in range(steps):
                scores.append(max(score for (layer, _), score in largest_scores(model, tokens).items() if layer == 0))
                step(model, optimizer, tokens)
    return scores


def test_a_lower_rate_keeps_scores_under_the_limit_where_they_grow_by_these_weights_alone():
    limit = 10.0
    assert max(trained_on_one_batch(80)) > 1.2 * limit
    guarded = trained_on_one_batch(80, guard=limit)
    assert max(guarded) <= limit
    assert guarded[-1] > limit / 4


def test_a_clip_lets_the_limit_be_passed_by_the_growth_of_one_step_alone():
    limit = 10.0
    scores = trained_on_one_batch(80)
    of_one_step = max(after / before for before, after in itertools.pairwise(scores))
    # A clip is that of the score before its step.
    assert limit < max(trained_on_one_batch(80, guard=limit, guard_by="clip")) < limit * of_one_step**2


def test_scores_of_a_closure_count_for_its_step():
    model = enlarged(BY_NAME["GPT-2"].model(torch.float64), 2.0)
    twin = copy.deepcopy(model)
    tokens = next(batches(1))
    limit = float(np.median(list(largest_scores(model, tokens).values())))
    for each, by_closure in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=LR)

        def closure(each: Any = each) -> Tensor:
            loss = loss_of(each, tokens)
            loss.backward()
            return loss

        with CircuitRates(optimizer, each, qk=1.0, guard=limit):
            if by_closure:
                optimizer.step(closure)
            else:
                step(each, optimizer, tokens)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("guard_by", ["rate", "clip"])
def test_several_optimizers_do_what_one_does(guard_by):
    def llama() -> Any:
        torch.manual_seed(0)
        config = small("LlamaConfig", vocab_size=VOCABULARY)
        return enlarged(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), 8.0)

    tokens = next(batches(1))
    limit = float(np.median(list(largest_scores(llama(), tokens).values())))
    states = []
    for several in (False, True):
        model = llama()
        keys = [parameter for name, parameter in model.named_parameters() if "k_proj" in name]
        rest = [parameter for name, parameter in model.named_parameters() if "k_proj" not in name]
        parts = [rest, keys] if several else [[*rest, *keys]]
        optimizers = [torch.optim.SGD(part, lr=LR) for part in parts]
        with CircuitRates(optimizers, model, qk=2.0, guard=limit, guard_by=guard_by) as rates:
            for _ in range(2):
                loss_of(model, tokens).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        held = rates.guard.table()
        assert (held["rate" if guard_by == "rate" else "clip"] < 1).any()
        assert held["step"].unique().tolist() == [1, 2]
        states.append([parameter.detach().clone() for _, parameter in sorted(model.named_parameters())])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def test_two_heads_of_one_matrix_have_no_rates_of_their_own_either():
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = small("LlamaConfig", vocab_size=VOCABULARY, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    muon = torch.optim.Muon([each for name, each in model.named_parameters() if "proj" in name], lr=LR)
    with pytest.raises(CallError, match="holds several heads, whose rates a guard lowers one by one"):
        CircuitRates(muon, model, qk=1.0, guard=100.0)


def test_muon_is_clipped_but_its_heads_have_no_rates_of_their_own():
    def llama() -> Any:
        torch.manual_seed(0)
        config = small("LlamaConfig", vocab_size=VOCABULARY, num_hidden_layers=1)
        return enlarged(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), 8.0)

    tokens = next(batches(1))
    states, clips = [], np.ones(4)
    for guarded in (False, True):
        model = llama()
        limit = 0.9 * min(largest_scores(model, tokens).values())
        matrices = [parameter for name, parameter in model.named_parameters() if "proj" in name]
        optimizer = torch.optim.Muon(matrices, lr=LR)
        if guarded:
            with pytest.raises(CallError, match="holds several heads, whose rates a guard lowers one by one"):
                CircuitRates(optimizer, model, qk=1.0, guard=limit)
            with CircuitRates(optimizer, model, qk=1.0, guard=limit, guard_by="clip") as rates:
                step(model, optimizer, tokens)
            clips = rates.guard.table()["clip"].to_numpy()
            assert bool((clips < 1).all())
        else:
            step(model, optimizer, tokens)
        states.append(model)
    plain, clipped = (model.model.layers[0].self_attn for model in states)
    factors = np.repeat(np.sqrt(clips), 12)
    for name in ("q_proj", "k_proj"):
        expected = getattr(plain, name).weight.detach().numpy() * factors[:, None]
        np.testing.assert_allclose(getattr(clipped, name).weight.detach(), expected, rtol=1e-12)
    assert torch.equal(plain.v_proj.weight, clipped.v_proj.weight)


def model_of(config: Any, kind: str = "sdpa") -> Any:
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kind)


def test_what_a_guard_cannot_hold_is_refused():
    capped = model_of(small("Gemma2Config", head_dim=12, num_key_value_heads=4), "eager")
    capped.config._attn_implementation_internal = "flex_attention"
    refused: dict[str, tuple[Any, dict[str, Any]]] = {
        "normalises its queries and keys (QK-norm), so that the size of W_Q and W_K does not affect": (
            model_of(small("Qwen3Config", head_dim=12, num_key_value_heads=4)),
            {},
        ),
        "caps its scores at 50 itself (soft cap)": (capped, {}),
        "clips its queries and keys at 8, so that its scores are not in proportion": (
            model_of(small("OlmoConfig", clip_qkv=8.0)),
            {"guard_by": "clip"},
        ),
        "forms maps, which do not tell the scores that a guard is to hold": (
            model_of(small("LlamaConfig"), "eager"),
            {},
        ),
        "guard should be a finite number above 0, got -1.0": (model_of(small("LlamaConfig")), {"guard": -1.0}),
    }
    for message, (model, options) in refused.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(CallError) as caught:
            CircuitRates(optimizer, model, qk=1.0, **{"guard": 100.0, **options})
        assert message in str(caught.value)
        assert not optimizer._optimizer_step_pre_hooks
    experts = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    latent = model_of(small("DeepseekV3Config", **experts))
    optimizer = torch.optim.SGD(latent.parameters(), lr=LR)
    with pytest.raises(QkovError, match="DeepseekV3"):
        CircuitRates(optimizer, latent, qk=1.0, guard=100.0, guard_by="clip")


def test_clipped_queries_and_keys_can_be_held_by_the_rate():
    model = model_of(small("OlmoConfig", clip_qkv=8.0))
    with CircuitRates(torch.optim.SGD(model.parameters(), lr=LR), model, qk=1.0, guard=100.0) as rates:
        assert rates.guard.by == "rate"


def test_a_layer_that_is_frozen_in_part_is_not_clipped():
    model = model_of(small("LlamaConfig"))
    model.model.layers[1].self_attn.k_proj.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=LR)
    with pytest.raises(
        CallError, match=r"layers\.1\.self_attn\.q_proj\.weight of layer 1 is trained, and other weights"
    ):
        CircuitRates(optimizer, model, qk=1.0, guard=100.0, guard_by="clip")


def test_what_is_done_is_told_in_words_and_ends_with_the_rates():
    model = enlarged(BY_NAME["GPT-2"].model(torch.float64), 2.0)
    tokens = next(batches(1))
    scores = largest_scores(model, tokens)
    limit = sorted(scores.values())[-2] * 1.0001
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with CircuitRates(optimizer, model, qk=1.0, guard=limit, guard_by="clip") as rates:
        step(model, optimizer, tokens)
        assert rates.guard.report().endswith(
            f"W_Q and W_K of 1 of 8 heads were scaled after the last step, to keep scores under {limit:g}."
        )
        assert f"guard: keeps the largest score of each head under {limit:g}, by scaling its" in rates.describe()
    before = len(rates.guard.table())
    step(model, optimizer, tokens)
    assert len(rates.guard.table()) == before
    assert not optimizer._optimizer_step_pre_hooks
    with CircuitRates(optimizer, model, qk=1.0, guard=1e6) as rates:
        step(model, optimizer, tokens)
        assert "W_Q and W_K of 0 of 8 heads learn at a lower rate, to keep scores under 1e+06." in rates.guard.report()
        assert "b_K from 100000 on" in rates.describe()
    with CircuitRates(optimizer, model, qk=2.0) as rates:
        with pytest.raises(CallError, match="these rates have no guard"):
            rates.guard  # noqa: B018
        assert "guard" not in rates.describe()


PROCESSES = """
import json
import sys
import torch
import torch.distributed
from qkov.probes import CircuitRates
from tests.probes.fused_models import BY_NAME, batches, loss_of

rank, rendezvous, guard_by = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
model = BY_NAME["GPT-2"].model(torch.float64)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with CircuitRates(optimizer, model, qk=1.0, guard=0.8, guard_by=guard_by) as rates:
    for step, tokens in enumerate(batches(6)):
        if step % 2 == rank:
            optimizer.zero_grad()
            loss_of(parallel, tokens).backward()
            optimizer.step()
table = rates.guard.table()
sums = [float(parameter.detach().sum()) for parameter in model.parameters()]
done = [table[name].tolist() for name in ("max_logit", "rate", "clip")]
print(json.dumps([sums, done]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("guard_by", ["rate", "clip"])
def test_several_processes_decide_alike_by_the_largest_score_of_all(guard_by, tmp_path):
    commands = [[sys.executable, "-c", PROCESSES, str(rank), str(tmp_path / "at"), guard_by] for rank in (0, 1)]
    options: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (sums, done), (other_sums, other_done) = (json.loads(output) for output, _ in outputs)
    assert sums == other_sums
    assert done == other_done
    assert min(*done[1], *done[2]) < 1
    model = BY_NAME["GPT-2"].model(torch.float64)
    first = [largest_scores(model, tokens) for tokens in list(batches(6))[:2]]
    expected = [max(scores[head] for scores in first) for head in sorted(first[0])]
    np.testing.assert_allclose(done[0][: len(expected)], expected, rtol=1e-12)


def test_a_module_of_ones_own_can_be_guarded():
    model = BY_NAME["nanoGPT"].model(torch.float32)
    assert isinstance(model, nn.Module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with CircuitRates(optimizer, model, qk=1.0, guard=1.0, heads=HEADS) as rates:
        for tokens in batches(3):
            step(model, optimizer, tokens)
    assert rates.guard.table()["rate"].lt(1).any()


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_is_seen_and_done_is_stored_with_the_rows_of_a_probe(in_memory, tmp_path):
    model = enlarged(BY_NAME["GPT-2"].model(torch.float64), 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    limit = float(np.median(list(largest_scores(model, next(batches(1))).values())))
    store = None if in_memory else tmp_path / "store"
    with (
        CircuitRates(optimizer, model, qk=1.0, guard=limit) as rates,
        AttentionHealth(model, optimizer, tell=None) as health,
        CircuitProbe(model, store, every=2, optimizer=optimizer, columns=rates.guard.columns) as probe,
        CircuitProbe(model, every=2, optimizer=optimizer, columns=health.columns) as other,
    ):
        for tokens in batches(4):
            step(model, optimizer, tokens)
    assert probe.failures == other.failures == 0
    done = rates.guard.table()
    done = done[done["step"] % 2 == 0]
    assert done["rate"].lt(1).any()
    names = {"max_logit": "max_logit", "attention_entropy": "entropy", "guard_rate": "rate", "guard_clip": "clip"}
    for each, stored in ((probe, list(names)), (other, ["max_logit", "attention_entropy"])):
        table = each.table()
        logged = table[(table["step"] > 0) & (table["circuit"] == "QK")].sort_values(["step", "layer", "head"])
        for name in stored:
            np.testing.assert_allclose(logged[name], done[names[name]], rtol=1e-12)
        assert table[table["circuit"] == "OV"]["max_logit"].isna().all()
    assert "guard_rate" not in other.table()
