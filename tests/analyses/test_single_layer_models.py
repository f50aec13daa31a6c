"""The single-layer model over token ids gives what it gives over counts, and its map the attention that it pays."""

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Batch, SingleLayerModel, predictions, rollout
from qkov.analyses.dynamics import Parameterization, Sequences, Setting, SingleLayerAttention, exact_population
from qkov.analyses.dynamics.fifty_token_task import FiftyTokenTask
from qkov.analyses.tasks import Example
from qkov.circuits import AttentionWeights, CallError, QkovError
from qkov.circuits.reading.saved_format import save_checkpoint

TASK = FiftyTokenTask(context_length=20)
SCALE = 50**-0.5


def trained(parameterization: Parameterization, d_model: int, classes: int, **options) -> SingleLayerAttention:
    """A model whose weights are large enough for attention to be far from uniform."""
    model = SingleLayerAttention(d_model, classes, parameterization, d_head=6, **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def drawn() -> tuple[torch.Tensor, Sequences]:
    tokens, _ = TASK.sample(7, np.random.default_rng(0))
    return tokens, TASK.sequences(tokens)


def read_map(adapted: SingleLayerModel, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    adapted.logits(tokens, mask, maps=lambda _layer, given: kept.append(given))
    return kept[0]


@pytest.mark.parametrize("parameterization", Parameterization, ids=lambda chosen: chosen.value)
def test_token_ids_give_what_counts_give(parameterization):
    model = trained(parameterization, 50, 4, heads=2, runs=3, score_scale=SCALE)
    tokens, sequences = drawn()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    qk, _ = model.products()
    attention = model.attention(sequences, qk)
    for run in range(3):
        adapted = SingleLayerModel(model, sequences.embedding, run=run)
        torch.testing.assert_close(adapted.logits(tokens, mask), model(sequences)[run], rtol=1e-10, atol=1e-10)
        row = read_map(adapted, tokens, mask)[:, :, -1]
        for head in range(2):
            of_token = torch.zeros_like(sequences.counts).scatter_add_(1, tokens, row[:, head].detach())
            torch.testing.assert_close(of_token, attention[run, head], rtol=1e-10, atol=1e-12)


def test_padding_changes_nothing_and_the_other_rows_are_the_identity_s():
    model = trained(Parameterization.FAFO, 50, 4, score_scale=SCALE)
    tokens, sequences = drawn()
    adapted = SingleLayerModel(model, sequences.embedding)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    padded = torch.cat([tokens, torch.zeros(7, 4, dtype=torch.long)], dim=1)
    shown = torch.cat([mask, torch.zeros(7, 4, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(adapted.logits(padded, shown), adapted.logits(tokens, mask), rtol=1e-12, atol=1e-12)
    whole = read_map(adapted, padded, shown)
    torch.testing.assert_close(whole.sum(dim=-1), torch.ones_like(whole[..., 0]), rtol=1e-12, atol=1e-12)
    assert adapted.readout(shown).tolist() == [20] * 7
    others = [place for place in range(25) if place != 20]
    identity = torch.eye(25, dtype=torch.float64)[others].expand(7, 1, -1, -1)
    assert torch.equal(whole[:, :, others], identity)


def test_rollout_of_the_one_layer_is_its_attention():
    model = trained(Parameterization.CACO, 50, 4, score_scale=SCALE)
    tokens, sequences = drawn()
    adapted = SingleLayerModel(model, sequences.embedding)
    batch = Batch.of([Example(tokens=tuple(row)) for row in tokens.tolist()], adapted.pad)
    found = rollout(adapted, batch)
    attention = read_map(adapted, tokens, batch.mask)[:, 0, -1].detach()
    residual = torch.nn.functional.one_hot(torch.full((7,), 20), 21)
    torch.testing.assert_close(found, 0.5 * attention + 0.5 * residual, rtol=1e-10, atol=1e-12)


def test_gradients_with_respect_to_the_map_are_the_values():
    model = trained(Parameterization.CACO, 50, 4, score_scale=SCALE)
    tokens, sequences = drawn()
    adapted = SingleLayerModel(model, sequences.embedding)
    kept: list[torch.Tensor] = []
    mask = torch.ones_like(tokens, dtype=torch.bool)
    logits = adapted.logits(tokens, mask, maps=lambda _layer, given: kept.append(given))
    (gradient,) = torch.autograd.grad(logits[:, 2].sum(), kept)
    _, ov = model.products()
    torch.testing.assert_close(gradient[:, 0, -1], ov[0, 0, 2][tokens], rtol=1e-12, atol=1e-12)
    assert not gradient[:, :, :-1].any()


@pytest.mark.parametrize("parameterization", Parameterization, ids=lambda chosen: chosen.value)
def test_a_checkpoint_of_a_reproduction_is_opened_with_its_vocabulary(parameterization, tmp_path):
    setting = Setting(M=3, b=4, m=2, n=4)
    population = exact_population(setting)
    model = trained(parameterization, population.embedding.shape[1], setting.M)
    weights = AttentionWeights(0, **{name: whole[0].detach() for name, whole in model.named_parameters()})
    settings = {"parameterization": parameterization.value, "setting": vars(setting), "ratio": 1.0}
    adapted = SingleLayerModel.open(save_checkpoint(tmp_path, 7, [weights], {"loss": 1.0}, settings))
    context = [torch.arange(len(counts)).repeat_interleave(counts.long()) for counts in population.counts]
    examples = [
        Example(tokens=(*tokens.tolist(), query))
        for tokens, query in zip(context, population.query.tolist(), strict=True)
    ]
    found = torch.stack(predictions(adapted, examples))
    wanted = model(population)[0].log_softmax(dim=-1).detach()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    batch = Batch.of(examples, adapted.pad)
    assert not read_map(adapted, batch.tokens, batch.mask)[:, :, -1, -1].any()
    for name, whole in model.named_parameters():
        assert torch.equal(getattr(adapted.attention_weights()[0], name), whole[0])


def test_where_no_key_is_left_nothing_is_attended_to():
    model = trained(Parameterization.FAFO, 50, 4)
    adapted = SingleLayerModel(model, torch.eye(50, dtype=torch.float64), query_among_keys=False)
    tokens, mask = torch.tensor([[5, 0]]), torch.tensor([[True, False]])
    assert adapted.logits(tokens, mask).tolist() == [[0.0] * 4]
    assert not read_map(adapted, tokens, mask)[0, 0, 0].any()


def test_ids_widths_and_runs_that_do_not_fit_are_refused():
    model = trained(Parameterization.FAFO, 50, 4)
    adapted = SingleLayerModel(model, torch.eye(50, dtype=torch.float64), name="a model")
    adapted.logits(torch.tensor([[0, 49]]), torch.tensor([[True, True]]))
    with pytest.raises(CallError, match="a model has tokens 0 to 49, got ids from -1 to 3"):
        adapted.logits(torch.tensor([[3, -1]]), torch.tensor([[True, True]]))
    with pytest.raises(CallError, match="a model has tokens 0 to 49, got ids from 3 to 50"):
        adapted.logits(torch.tensor([[3, 50]]), torch.tensor([[True, True]]))
    with pytest.raises(CallError, match="the model has width 50, and the vectors of its tokens have width 20"):
        SingleLayerModel(model, torch.eye(20, dtype=torch.float64))
    with pytest.raises(CallError, match="the model has runs 0 to 0, got run 1"):
        SingleLayerModel(model, torch.eye(50, dtype=torch.float64), run=1)


def test_checkpoints_without_a_population_are_refused(tmp_path):
    weights = AttentionWeights(0, W_QK=torch.zeros(1, 3, 3), W_OV=torch.zeros(1, 2, 3))
    path = save_checkpoint(tmp_path, 0, [weights], {}, {"seed": 1})
    with pytest.raises(QkovError, match=r"step_000000000\.safetensors does not state the population"):
        SingleLayerModel.open(path)


def test_the_model_is_one_layer_without_a_residual_stream_read_at_the_last_token():
    adapted = SingleLayerModel(trained(Parameterization.FAFO, 50, 4), torch.eye(50, dtype=torch.float64))
    assert (adapted.layers, adapted.layer_keys, adapted.heads) == (1, (("", 0),), 1)
    assert adapted.causal
    assert adapted.classifies
    assert not adapted.residual_stream
    assert not adapted.own_padding
    assert (adapted.pad, adapted.mask_token, adapted.context) == (0, None, None)
    with pytest.raises(CallError, match="the model has runs 0 to 0, got run -1"):
        SingleLayerModel(trained(Parameterization.FAFO, 50, 4), torch.eye(50, dtype=torch.float64), run=-1)
