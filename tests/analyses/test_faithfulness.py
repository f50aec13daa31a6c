import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from qkov.analyses.attention import Bootstrap, Perturbation, faithfulness
from qkov.analyses.attention.models.transformers import (
    TransformersCausalLM,
    TransformersClassifier,
    TransformersMaskedLM,
)
from qkov.analyses.attention.rationales.faithfulness import RANDOM
from qkov.analyses.attention.rationales.perturbation import ERASER_CUTS
from qkov.analyses.tasks import Example
from qkov.circuits import CallError, QkovError

from .bag_of_words import BagOfWords

WEIGHTS = [0.0, 1.0, -0.5, 2.0, 0.25, -3.0, 0.75, 0.0, 0.0]
EVERYTHING = Perturbation(keep_readout=False)
BOTH = ["comprehensiveness", "sufficiency"]
MASK, CLASS_TOKEN = 3, 4


def p(*tokens: int) -> float:
    return 1 / (1 + math.exp(-sum(WEIGHTS[token] for token in tokens)))


def row(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64)


def of(table: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    for column, value in wanted.items():
        table = table[table[column] == value]
    return table


def test_a_bag_of_words_gives_what_its_closed_form_says():
    model = BagOfWords(WEIGHTS)
    example = Example(tokens=(1, 2, 3, 4), id="a", group="g")
    settings = Perturbation(cuts=(0.25, 0.5), keep_readout=False)
    table = faithfulness(model, [example], {"own": [row(0.1, 0.2, 0.4, 0.3)]}, settings, draws=0).table
    given, turned = of(table, order="given"), of(table, order="reversed")
    whole = p(1, 2, 3, 4)
    assert given[["id", "group", "method", "cut", "k", "removable"]].values.tolist() == [
        ["a", "g", "own", 0.25, 1, 4],
        ["a", "g", "own", 0.5, 2, 4],
    ]
    np.testing.assert_allclose(
        given[BOTH], [[whole - p(1, 2, 4), whole - p(3)], [whole - p(1, 2), whole - p(3, 4)]], atol=1e-15
    )
    np.testing.assert_allclose(
        turned[BOTH], [[whole - p(2, 3, 4), whole - p(1)], [whole - p(3, 4), whole - p(1, 2)]], atol=1e-15
    )


def test_what_is_measured_is_the_predicted_class_or_the_label():
    model = BagOfWords(WEIGHTS)
    # Token 5 makes class 0 the predicted one.
    example = Example(tokens=(1, 5), label=1)
    rows = {"own": [row(0.0, 1.0)]}
    predicted = faithfulness(model, [example], rows, EVERYTHING, draws=0).table
    labelled = faithfulness(model, [example], rows, EVERYTHING, draws=0, target="label").table
    np.testing.assert_allclose(of(predicted, order="given")[BOTH], [[p(1) - p(1, 5), p(5) - p(1, 5)]] * 5, atol=1e-15)
    np.testing.assert_allclose(labelled[BOTH], -predicted[BOTH], atol=1e-15)
    with pytest.raises(CallError, match=r"example 0 has no label; use target='predicted'"):
        faithfulness(model, [Example(tokens=(1, 2))], rows, EVERYTHING, target="label")
    with pytest.raises(CallError, match="label 2; expected one of its 2 alternatives"):
        faithfulness(model, [Example(tokens=(1, 2), label=2)], rows, EVERYTHING, target="label")


def test_the_three_removals_agree_where_order_does_not_count_and_the_mask_token_says_nothing():
    model = BagOfWords(WEIGHTS, mask_token=7)
    examples = [Example(tokens=(8, 1, 2, 3, 5), special=(True, *[False] * 4)), Example(tokens=(4, 6, 3))]
    rows = {"own": [row(9, 0.1, 0.5, 0.2, 0.3), row(0.3, 0.2, 0.1)]}
    deletion, *others = (
        faithfulness(model, examples, rows, Perturbation(removal=removal, keep_readout=False)).table
        for removal in ("deletion", "mask token", "attention mask")
    )
    for other in others:
        np.testing.assert_allclose(other[BOTH], deletion[BOTH], atol=1e-15)
    # 5 comes before 3 in the ranking; the special token is in every input, though its weight is the highest.
    first = of(deletion, example=0, method="own", order="given", cut=0.5)
    # Class 0 is the predicted one.
    whole = 1 - p(1, 2, 3, 5)
    np.testing.assert_allclose(first[BOTH], [[whole - (1 - p(1, 3)), whole - (1 - p(2, 5))]], atol=1e-15)


def test_a_mask_token_that_says_something_counts():
    model = BagOfWords(WEIGHTS, mask_token=6)
    settings = Perturbation(cuts=(0.5,), removal="mask token", keep_readout=False)
    table = faithfulness(model, [Example(tokens=(1, 3))], {"own": [row(2, 1)]}, settings, draws=0).table
    np.testing.assert_allclose(of(table, order="given")[BOTH], [[p(1, 3) - p(6, 3), p(1, 3) - p(1, 6)]], atol=1e-15)


def test_a_single_token_is_all_that_was_said_where_something_else_is_left():
    model = BagOfWords(WEIGHTS)
    examples = [
        Example(tokens=(8, 3), special=(True, False)),
        Example(tokens=(3,)),
        Example(tokens=(8,), special=(True,)),
    ]
    rows = {"own": [row(0.5, 0.5), row(1), row(1)]}
    found = faithfulness(model, examples, rows, EVERYTHING, draws=1)
    np.testing.assert_allclose(found.table[BOTH], [[p(3) - 0.5, 0.0]] * 15, atol=1e-15)
    assert set(found.table["example"]) == {0}
    assert found.left_out == (
        ("with a single token, without which nothing is left", 1),
        ("without a token that can be removed", 1),
    )
    with pytest.raises(CallError, match="no example can take part: 1 with a single token"):
        faithfulness(model, examples[1:2], {"own": [row(1)]}, EVERYTHING)
    with pytest.raises(CallError, match="no example can take part"):
        faithfulness(model, [], {}, EVERYTHING)


def test_the_area_is_the_mean_over_the_cuts_with_or_without_the_empty_one():
    model = BagOfWords(WEIGHTS)
    example = Example(tokens=(8, 1, 2, 3, 4), special=(True, *[False] * 4))
    rows = {"own": [row(0, 0.1, 0.2, 0.4, 0.3)]}
    cuts = (0.25, 0.5)
    plain = faithfulness(model, [example], rows, Perturbation(cuts=cuts, keep_readout=False), draws=0)
    whole = p(1, 2, 3, 4)
    comprehensiveness, sufficiency = [whole - p(1, 2, 4), whole - p(1, 2)], [whole - p(3), whole - p(3, 4)]
    np.testing.assert_allclose(
        of(plain.aopc(), order="given")[BOTH], [[np.mean(comprehensiveness), np.mean(sufficiency)]], atol=1e-15
    )
    # The formula of the paper: the sum from k = 0 to |B|, over |B| + 1.
    empty = faithfulness(model, [example], rows, Perturbation(cuts=(0.0, *cuts), keep_readout=False), draws=0)
    np.testing.assert_allclose(
        of(empty.aopc(), order="given")[BOTH],
        [[(0 + sum(comprehensiveness)) / 3, (whole - 0.5 + sum(sufficiency)) / 3]],
        atol=1e-15,
    )


def test_curves_and_band_are_means_over_examples():
    model = BagOfWords(WEIGHTS)
    examples = [Example(tokens=(1, 2, 3, 4, 5, 6)), Example(tokens=(6, 5, 4)), Example(tokens=(3, 3, 2, 1))]
    rows = {"own": [torch.rand(len(one.tokens), dtype=torch.float64) for one in examples]}
    found = faithfulness(model, examples, rows, EVERYTHING, draws=4)
    curves, band, table = found.curves(), found.random_band(), found.table
    assert len(curves) == 3 * len(ERASER_CUTS)
    assert len(band) == len(ERASER_CUTS)
    for cut in ERASER_CUTS:
        for method, order in (("own", "given"), ("own", "reversed"), (RANDOM, "given")):
            rows_of = of(table, method=method, order=order, cut=cut)
            mean = of(curves, method=method, order=order, cut=cut)
            np.testing.assert_allclose(mean[["k", *BOTH]].iloc[0], rows_of[["k", *BOTH]].mean(), atol=1e-15)
        draws = [of(table, method=RANDOM, draw=draw, cut=cut)["sufficiency"].mean() for draw in range(4)]
        one = of(band, cut=cut).iloc[0]
        assert one["sufficiency"] == pytest.approx(np.mean(draws), abs=1e-15)
        assert (one["sufficiency_lowest"], one["sufficiency_highest"]) == pytest.approx((min(draws), max(draws)))
        assert one["sufficiency_lowest"] < one["sufficiency_highest"]


def test_the_summary_is_the_mean_area_with_an_interval_over_examples():
    model = BagOfWords(WEIGHTS)
    generator = np.random.default_rng(0)
    examples = [
        Example(tokens=tuple(generator.integers(1, 7, size).tolist())) for size in generator.integers(2, 12, 60)
    ]
    rows = {"own": [torch.from_numpy(generator.random(len(one.tokens))) for one in examples]}
    found = faithfulness(model, examples, rows, EVERYTHING, draws=3)
    summary = found.summary(Bootstrap(resamples=2000))
    assert len(summary) == 3 * 2
    for _, one in summary.iterrows():
        method, order, metric = one["method"], one["order"], one["metric"]
        areas = of(found.table, method=method, order=order).groupby("example")[metric].mean()
        assert one["value"] == pytest.approx(areas.mean(), abs=1e-12)
        assert one["examples"] == 60
        # A bootstrap interval of a mean is about as wide as the normal one.
        width = 2 * 1.96 * areas.std() / math.sqrt(60)
        assert one["high"] - one["low"] == pytest.approx(width, rel=0.15)


def test_random_rankings_are_seeded_and_do_not_depend_on_other_examples():
    model = BagOfWords(WEIGHTS)
    examples = [Example(tokens=(1, 2, 3, 4, 5, 6)), Example(tokens=(6, 5, 4, 2))]
    both, again, other = (faithfulness(model, examples, {}, EVERYTHING, seed=seed).table for seed in (1, 1, 2))
    one = faithfulness(model, examples[:1], {"own": [row(*range(6))]}, EVERYTHING, seed=1).table
    pd.testing.assert_frame_equal(both, again)
    assert not np.allclose(both[BOTH], other[BOTH])
    np.testing.assert_array_equal(of(one, method=RANDOM)[BOTH], of(both, example=0)[BOTH])
    assert of(both, example=0).groupby("draw")["comprehensiveness"].mean().nunique() > 1


def test_random_rankings_take_every_token_equally_often():
    # At a cut of one token in four, comprehensiveness is one of four values, each a quarter of the time.
    model = BagOfWords(WEIGHTS)
    settings = Perturbation(cuts=(0.25,), keep_readout=False)
    table = faithfulness(model, [Example(tokens=(1, 2, 3, 4))], {}, settings, draws=4000).table
    counts = table["comprehensiveness"].round(12).value_counts()
    # Four standard deviations of a binomial of 4000 and 1/4.
    assert (abs(counts - 1000) < 4 * math.sqrt(4000 * 0.25 * 0.75)).all()
    assert len(counts) == 4


def test_inputs_that_are_alike_run_once():
    model = BagOfWords(WEIGHTS, reads_first=True)
    example = Example(tokens=(8, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4), special=(True, *[False] * 10))
    steps = []
    faithfulness(
        model,
        [example],
        {"own": [torch.arange(11, dtype=torch.float64)], "same": [torch.arange(11, dtype=torch.float64) * 2]},
        draws=0,
        progress=lambda done, total: steps.append((done, total)),
    )
    # Shares of 1, 5 and 10% are one token, 20% is two, 50% is five: three pairs in each direction. The half without the
    # last five is the one with the first five alone.
    assert len(model.inputs) == 1 + 2 * 2 * 3 - 2
    assert len(set(model.inputs)) == len(model.inputs)
    assert steps[-1] == (10, 10)


def test_rows_that_are_not_those_of_the_examples_are_refused():
    model, examples = BagOfWords(WEIGHTS), [Example(tokens=(1, 2), id="x")]
    with pytest.raises(CallError, match="own has rows for 0 examples; expected 1"):
        faithfulness(model, examples, {"own": []}, EVERYTHING)
    with pytest.raises(
        CallError, match="row of own for example x has 3 weights; expected one for each of its 2 tokens"
    ):
        faithfulness(model, examples, {"own": [row(1, 2, 3)]}, EVERYTHING)
    with pytest.raises(QkovError, match="weight of own for example x is not finite"):
        faithfulness(model, examples, {"own": [row(1, math.nan)]}, EVERYTHING)
    with pytest.raises(CallError, match="'random' is the name"):
        faithfulness(model, examples, {RANDOM: [row(1, 2)]}, EVERYTHING)
    with pytest.raises(CallError, match="draws should be 0 or more"):
        faithfulness(model, examples, {}, EVERYTHING, draws=-1)
    with pytest.raises(CallError, match="no mask token"):
        faithfulness(model, examples, {}, Perturbation(removal="mask token", keep_readout=False))


def test_a_probability_that_is_not_finite_is_told():
    with pytest.raises(QkovError, match="bag of words gives a probability that is not finite"):
        faithfulness(BagOfWords([0.0, math.nan, 1.0]), [Example(tokens=(1, 2))], {}, EVERYTHING)


# Against a plain loop over examples and cuts that runs transformers' model on one input at a time.


def _with_large_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Far from uniform predictions, so that removal has effects of every size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    return _with_large_weights(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        )
    )


def bert(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        max_position_embeddings=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    config.num_labels = 3
    return _with_large_weights(getattr(transformers, kind)(config))


def sentences(kind: str) -> list[Example]:
    generator = np.random.default_rng(3)
    made = []
    for number, length in enumerate((4, 11, 2, 7, 11, 23, 1)):
        tokens = generator.integers(5, 40, length).tolist()
        if kind == "causal":
            two = tuple(tuple(generator.integers(5, 40, size).tolist()) for size in (1 + number % 3, 1))
            made.append(Example(tokens=tuple(tokens), label=number % 2, continuations=two))
            continue
        fills = kind == "masked"
        inner = (*tokens, MASK) if fills else tuple(tokens)
        special = (True, *[False] * length, *[True] * fills)
        continuations = ((7,), (9,)) if fills else ()
        made.append(Example((CLASS_TOKEN, *inner), label=number % 2, continuations=continuations, special=special))
    return made


def with_likely_continuations(hf, kind, example):
    """Give a masked language model the two likeliest tokens to choose from, so that there is something to lose."""
    if kind != "masked":
        return example
    with torch.no_grad():
        likely = hf(torch.tensor([example.tokens])).logits[0, example.tokens.index(MASK)].topk(2).indices.tolist()
    return replace(example, continuations=tuple((token,) for token in likely))


def log_probability(hf, kind, example, tokens, seen, chosen):
    """One input through transformers' model; `seen` marks what the attention mask shows."""
    with torch.no_grad():
        if kind != "causal":
            out = hf(torch.tensor([tokens]), attention_mask=torch.tensor([seen])).logits[0].double()
            if kind == "classifier":
                return out.log_softmax(-1)[chosen].item()
            place = max(index for index, token in enumerate(tokens) if token == MASK)
            return out[place].log_softmax(-1)[example.continuations[chosen][0]].item()
        continuation = example.continuations[chosen]
        last = max(index for index, one in enumerate(seen) if one)
        whole = [*tokens, *continuation]
        shown = torch.tensor([[*seen, *[1] * len(continuation)]])
        positions = torch.arange(len(whole))[None]
        out = hf(torch.tensor([whole]), attention_mask=shown, position_ids=positions).logits[0].double().log_softmax(-1)
        places = [last, *range(len(tokens), len(whole) - 1)]
        return sum(out[place, token].item() for place, token in zip(places, continuation, strict=True))


def plain_loop(hf, kind, examples, rows, removal, target, keep_readout):
    found = []
    for example, weights in zip(examples, rows, strict=True):
        length = len(example.tokens)
        never = {place for place in range(length) if example.is_special[place]}
        if kind == "causal" and keep_readout:
            never.add(length - 1)
        removable = [place for place in range(length) if place not in never]
        if not removable or (len(removable) == 1 and not never):
            continue
        alternatives = range(3 if kind == "classifier" else 2)
        whole = [log_probability(hf, kind, example, example.tokens, [1] * length, one) for one in alternatives]
        chosen = example.label if target == "label" else int(np.argmax(whole))
        ranked = sorted(removable, key=lambda place: (-float(weights[place]), place))
        for cut in ERASER_CUTS:
            k = max(1, -(-round(100 * cut) * len(removable) // 100))
            away = set(ranked[:k])
            pair = []
            for gone in (away, set(removable) - away):
                kept = [place for place in range(length) if place not in gone]
                tokens, seen = list(example.tokens), [1] * length
                if removal == "deletion":
                    tokens, seen = [example.tokens[place] for place in kept], [1] * len(kept)
                elif removal == "mask token":
                    tokens = [MASK if place in gone else token for place, token in enumerate(example.tokens)]
                else:
                    seen = [int(place not in gone) for place in range(length)]
                lost = math.exp(whole[chosen]) - math.exp(log_probability(hf, kind, example, tokens, seen, chosen))
                pair.append(lost)
            found.append((cut, k, *pair))
    return found


@pytest.mark.parametrize("removal", ["deletion", "mask token", "attention mask"])
@pytest.mark.parametrize("kind", ["causal", "classifier", "masked"])
@pytest.mark.parametrize(("target", "keep_readout"), [("predicted", True), ("label", False)])
def test_all_at_once_is_what_a_plain_loop_gives(kind, removal, target, keep_readout):
    hf = {
        "causal": gpt2,
        "classifier": lambda: bert("BertForSequenceClassification"),
        "masked": lambda: bert("BertForMaskedLM"),
    }[kind]()
    adapter = {"causal": TransformersCausalLM, "classifier": TransformersClassifier, "masked": TransformersMaskedLM}[
        kind
    ]
    model = adapter(hf, mask_token=MASK)
    examples = [with_likely_continuations(hf, kind, example) for example in sentences(kind)]
    generator = torch.Generator().manual_seed(5)
    # Of few values, so that some are equal.
    rows = [torch.randint(0, 6, (len(one.tokens),), generator=generator).double() for one in examples]
    settings = Perturbation(removal=removal, keep_readout=keep_readout)
    found = faithfulness(model, examples, {"own": rows}, settings, target=target, draws=2, batch_tokens=100)
    ours = of(found.table, method="own", order="given")
    expected = np.array(plain_loop(hf, kind, examples, rows, removal, target, keep_readout))
    np.testing.assert_array_equal(ours[["cut", "k"]], expected[:, :2])
    # Float32 models: batched and single products differ in the last places of logits of a few tens.
    np.testing.assert_allclose(ours[BOTH], expected[:, 2:], atol=2e-5)
    assert np.abs(expected[:, 2:]).max() > 0.1


def test_the_next_token_is_an_alternative_where_there_are_no_continuations():
    hf = gpt2()
    example = Example(tokens=(5, 9, 12, 30, 7, 21))
    with torch.no_grad():
        whole, without, alone = (
            hf(torch.tensor([tokens])).logits[0, -1].double().softmax(-1)
            for tokens in ([5, 9, 12, 30, 7, 21], [9, 12, 30, 7, 21], [5, 21])
        )
    y = int(whole.argmax())
    settings = Perturbation(cuts=(0.2,))
    rows = {"own": [row(6, 5, 4, 3, 2, 1)]}
    table = faithfulness(TransformersCausalLM(hf), [example], rows, settings, draws=0).table
    expected = [[float(whole[y] - without[y]), float(whole[y] - alone[y])]]
    np.testing.assert_allclose(of(table, order="given")[BOTH], expected, atol=1e-5)


def test_among_the_alternatives_the_probabilities_of_a_language_model_sum_to_one():
    hf = gpt2()
    example = Example(tokens=(5, 9, 12, 30, 7, 21), label=1, continuations=((8,), (14,)))
    with torch.no_grad():
        whole, without = (
            hf(torch.tensor([tokens])).logits[0, -1].double()[[8, 14]].softmax(0)[1].item()
            for tokens in ([5, 9, 12, 30, 7, 21], [9, 12, 30, 7, 21])
        )
    table = faithfulness(
        TransformersCausalLM(hf),
        [example],
        {"own": [row(6, 5, 4, 3, 2, 1)]},
        Perturbation(cuts=(0.2,)),
        target="label",
        among_alternatives=True,
        draws=0,
    ).table
    assert of(table, order="given")["comprehensiveness"].item() == pytest.approx(whole - without, abs=1e-5)
