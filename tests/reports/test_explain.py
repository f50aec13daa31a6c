"""`qkov explain` from the command line: what it prints and writes, its report, and one line for whatever is wrong."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from qkov.analyses.attention import (
    ExplanationSettings,
    Rollout,
    explain,
    load_model,
    read_explanation,
    write_explanation,
)
from qkov.analyses.attention.explanation import explanation as explanation_module
from qkov.analyses.dynamics import Setting, exact_population
from qkov.analyses.tasks import Example, Task
from qkov.circuits import AttentionWeights
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.reports.commands.explain_options import ExplainOptions, task_options
from qkov.reports.commands.main import run
from qkov.reports.drawing.heat_maps import STRONGEST
from qkov.reports.drawing.panels import COLOURS

from ..analyses.tiny_models import CAUSAL, CLASSIFIERS, MASKED
from ..analyses.toy_attention import ToyAttention, batch_of
from ..analyses.word_tokens import word_tokeniser
from .test_command_line import refused
from .test_page import references
from .test_reproduction import in_browser, luminance

PAIRS = [
    ("the key near the doors", "the keys near the doors", " is", " are"),
    ("the <b> near the door", "the keys near the door", " is", " are"),
    ("the man by the tables", "the men by the tables", " likes", " like"),
    ("the friends by the door", "the friend by the door", " are", " is"),
    ("the table near the men", "the tables near the men", " is", " are"),
    ("a good friend", "a good friends", " likes", " like"),
]


def saved(folder: Path, tiny) -> Path:
    tiny.build().save_pretrained(folder)
    word_tokeniser().save_pretrained(folder)
    return folder


def write_pairs(path: Path) -> Path:
    keys = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
    path.write_text("\n".join(json.dumps(dict(zip(keys, pair, strict=True)) | {"case": "c"}) for pair in PAIRS))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a causal language model, a masked one, a classifier, and data."""
    place = tmp_path_factory.mktemp("explain")
    saved(place / "gpt2", CAUSAL[0])
    saved(place / "masked", MASKED[0])
    saved(place / "classifier", CLASSIFIERS[0])
    write_pairs(place / "pairs.json")
    words = [
        {"tokens": pair[0].split(), "relevant": [0, 1] + [0] * (len(pair[0].split()) - 2), "label": label}
        for pair, label in zip(PAIRS, ["good", "bad"] * 3, strict=True)
    ]
    (place / "lines.jsonl").write_text("\n".join(map(json.dumps, words)))
    return place


@pytest.fixture(scope="module")
def explained(place) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert run(["explain", "gpt2", "agreement", "--data", "pairs.json"]) == 0
    return place / "qkov-gpt2-agreement"


def test_what_is_printed_and_written(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    arguments = ["explain", "gpt2", "agreement", "--data", "pairs.json", "--out", "out", "--json"]
    assert run([*arguments, "--methods", "rollout,ablation,random", "--cuts", "20,50", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    printed = json.loads(captured.out)
    assert printed["report"] == "out/report.html"
    assert printed["examples"] == len(PAIRS)
    assert list(printed["methods"]) == ["rollout", "ablation", "random"]
    examples = pd.read_parquet(place / "out" / "examples.parquet")
    assert printed["accuracy"] == pytest.approx(examples["correct"].mean())
    assert printed["relevance"]["MRTA"]["value"] == pytest.approx(examples["attention"].mean())
    assert printed["relevance"]["MRTA"]["chance"] == pytest.approx(examples["chance"].mean())
    faithful = pd.read_parquet(place / "out" / "faithfulness.parquet")
    assert sorted(faithful["cut"].unique()) == [0.2, 0.5]
    described = json.loads((place / "out" / "explanation.json").read_text())
    assert described["settings"]["seed"] == 3
    arguments = [*arguments[:-1], "--methods", "rollout,random", "--cuts", "50"]
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert f"{len(PAIRS)} examples of agreement; gpt2 is right in" in captured.out
    assert "MRTA by rollout: " in captured.out
    assert captured.out.endswith("tables: out\nreport: out/report.html\n")
    assert "perturbed inputs" in captured.err


def test_a_report_can_be_rendered_again(explained, capsys, tmp_path):
    assert run(["report", str(explained), "--out", str(tmp_path / "again.html")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'again.html'}\n"
    first, second = (
        re.sub(r"figure\d+-", "", page.read_text()) for page in (explained / "report.html", tmp_path / "again.html")
    )
    assert first[: first.index("measured by")] == second[: second.index("measured by")]


def test_a_report_states_settings_that_the_command_line_does_not_have(tmp_path, capsys):
    examples = tuple(replace(one, relevant=((True,) + (False,) * 4,)) for one in batch_of(5, 5).examples)
    task = Task(name="toy", examples=examples, relevant="the first token", classes=("a", "b", "c"))
    rollout = Rollout(residual=(0.5, 0.25, 0.0), layers=range(1, 3), discard=0.2)
    settings = ExplanationSettings(methods=("rollout", "random"), rollout=rollout, resamples=50)
    write_explanation(explain(ToyAttention(), task, settings), tmp_path)
    assert run(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    page = (tmp_path / "page.html").read_text()
    assert "50 %, 25 %, 0 % of the identity" in page
    assert "Only layers 1, 2 take part. Of each query&#39;s keys, at most 20 % are dropped" in page


@pytest.mark.parametrize("training", [False, True])
def test_the_report_says_the_mode_and_that_dropout_was_not_active(training, tmp_path, capsys):
    model = CLASSIFIERS[0].build().train(training)
    examples = [Example((8 + k, 9, 10, 11), label=k % 2, relevant=((True, False, False, False),)) for k in range(4)]
    task = Task(name="toy", examples=tuple(examples), relevant="the first token", classes=("a", "b"))
    settings = ExplanationSettings(methods=("rollout", "random"), draws=1, resamples=50)
    write_explanation(explain(load_model(model), task, settings), tmp_path)
    assert model.training is training
    described = json.loads((tmp_path / "explanation.json").read_text())
    assert described["model"]["mode"].startswith("evaluation, without dropout")
    page = tmp_path / "page.html"
    assert run(["report", str(tmp_path), "--out", str(page)]) == 0
    also = ", although the model itself is in training mode" * training
    assert f"<dt>mode</dt><dd>evaluation, without dropout{also}</dd>" in page.read_text()
    # An explanation that was written before the mode was noted has none to state.
    del described["model"]["mode"]
    (tmp_path / "explanation.json").write_text(json.dumps(described))
    assert run(["report", str(tmp_path), "--out", str(page)]) == 0
    assert "<dt>mode</dt>" not in page.read_text()
    capsys.readouterr()


def test_the_page_says_the_figures_of_the_tables(explained):
    page = (explained / "report.html").read_text()
    parsed = references(page)
    assert [each for each in parsed.fetched if not each.startswith(("#", "data:"))] == []
    assert parsed.scripts == 0
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[page.index("<main>") :])))
    explanation = read_explanation(explained)
    row = explanation.relevance.query("method == 'rollout' and metric == 'MRTA' and tokens == 'all tokens'").iloc[0]
    assert f"{row['value']:.3f} {row['low']:.3f} to {row['high']:.3f}" in text
    best = explanation.heads.nlargest(1, "attention").iloc[0]
    assert f"head {best['head']:.0f} of layer {best['layer']:.0f}: {100 * best['attention']:.1f} %" in text
    for method, of_one in explanation.methods.groupby("method"):
        value = of_one.set_index("metric")["value"]["comprehensiveness"]
        assert re.search(rf"{method} {value:.3f}".replace("-", "−"), text)
    assert "definitions are this project's" in text
    assert "The convention is the standard one" in text


def test_examples_are_marked_and_escaped(explained):
    page = (explained / "report.html").read_text()
    marked = re.findall(r'<p class="marked">(.*?)</p>', page, flags=re.DOTALL)
    assert len(marked) == len(PAIRS)
    shown = [html.unescape(re.sub(r"<[^>]+>", "", one)) for one in marked]
    assert sorted(shown) == sorted(pair[0] for pair in PAIRS)
    assert "&lt;b&gt;" in page
    underlined = [re.findall(r'<span class="token relevant[^"]*"[^>]*>([^<]*)</span>', one) for one in marked]
    assert sorted(html.unescape(word) for (word,) in underlined) == ["<b>", "friend", "friends", "key", "man", "table"]
    attention = read_explanation(explained).examples.set_index("text")["attention"]
    assert shown[0] == attention.idxmax()
    assert shown[len(shown) // 2] == attention.idxmin()


@pytest.mark.parametrize(
    ("model", "task", "more"),
    [
        ("masked", "agreement", ["--data", "pairs.json", "--removal", "mask"]),
        (
            "classifier",
            "lines",
            ["--data", "lines.jsonl", "--removal", "attention", "--fusion", "max", "--target", "label"],
        ),
        ("gpt2", "induction", ["--limit", "8", "--option", "length=5", "--cuts", "50"]),
    ],
)
def test_other_models_and_tasks(place, tmp_path, capsys, monkeypatch, model, task, more):
    monkeypatch.chdir(place)
    methods = ["--methods", "last layer,random"]
    assert run(["explain", model, task, *more, *methods, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert 0 < printed["relevance"]["MRTA"]["value"] < 1
    assert "Is attention faithful?" in (tmp_path / "report.html").read_text()


def test_a_checkpoint_of_a_reproduction(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setting = Setting(M=4, b=4, m=1, n=4)
    population = exact_population(setting)
    d_model, generator = population.embedding.shape[1], torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(1, *shape, dtype=torch.float64, generator=generator)
        for name, shape in (("W_QK", (d_model, d_model)), ("W_OV", (setting.M, d_model)))
    }
    settings = {"parameterization": "CACO", "setting": vars(setting), "ratio": 1.0}
    save_checkpoint(tmp_path / "run", 5, [AttentionWeights(0, **drawn)], {}, settings)
    assert run(["explain", "run", "population", "--methods", "rollout,random", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["examples"] == len(population.label)
    # Without a residual stream rollout is the attention itself.
    described = read_explanation(tmp_path / "qkov-run-population").description
    assert described["settings"]["rollout"]["residual"] == 0
    scores = torch.einsum("vd,de,qe->qv", population.embedding, drawn["W_QK"][0], population.embedding)
    weights = population.counts * scores[population.query].exp()
    alpha = (weights * population.relevant).sum(dim=1) / weights.sum(dim=1)
    assert printed["relevance"]["MRTA"]["value"] == pytest.approx(float(alpha.mean()))
    assert printed["relevance"]["MRTA"]["chance"] == pytest.approx(1 / 6)


def test_a_task_without_relevant_tokens_is_told(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    (tmp_path / "a.text").write_text("the key is good\nthe men like the door\n")
    (tmp_path / "a.gold").write_text("2\tis\tare\t0\n2\tlike\tlikes\t0\n")
    arguments = ["explain", "gpt2", "agreement", "--data", str(tmp_path), "--methods", "rollout,random"]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "no example has relevant tokens" in printed
    assert "left out of relevance: 2 without a relevant token" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "This cannot be answered: no example of this task has relevant tokens." in page
    assert "Removing the first tokens costs most" in page
    (tmp_path / "subjects").write_text("1\n1\n")
    assert run([*arguments, "--option", f"subjects={tmp_path / 'subjects'}", "--out", str(tmp_path / "out")]) == 0
    assert "MRTA by rollout" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["gpt2", "riddles"], "there is no task 'riddles'; the known tasks are fifty-token, population", 2),
        (["gpt2", "squad"], "task squad needs data", 2),
        (["gpt2", "agreement", "--data", "missing.json"], "missing.json does not exist", 2),
        (["gpt2", "lines", "--data", "lines.jsonl"], "predicts tokens, and lines has classes (bad, good)", 2),
        (["classifier", "agreement", "--data", "pairs.json"], "classifies whole sequences", 2),
        (["gpt2", "agreement", "--methods", "magic"], "there is no method 'magic'", 2),
        (["gpt2", "agreement", "--methods", "random,rollout"], "expected an attention measure", 2),
        (["gpt2", "agreement", "--cuts", "a,b"], "--cuts should be comma-separated percentages", 2),
        (["gpt2", "agreement", "--cuts", "500"], "cuts should be different shares", 2),
        (
            ["gpt2", "agreement", "--removal", "mask", "--limit", "4", "--tokenizer", "no"],
            "no cannot be read as a tokenizer",
            1,
        ),
        (["gpt2", "agreement", "--removal", "shred"], "--removal should be one of delete, mask, attention", 2),
        (["gpt2", "agreement", "--convention", "theirs"], "--convention should be one of standard, paper", 2),
        (["gpt2", "squad", "--convention", "paper"], "squad has no paper convention", 2),
        (["gpt2", "agreement", "--convention", "paper", "--limit", "4"], "takes at most 32 tokens, got 128", 2),
        (["gpt2", "agreement", "--residual", "2"], "residual is a share", 2),
        (["gpt2", "agreement", "--fusion", "sum"], "--fusion should be one of mean, max, min", 2),
        (["gpt2", "agreement", "--option", "attractors"], "--option should be NAME=VALUE", 2),
        (["gpt2", "agreement", "--option", "colour=red"], "no option colour", 2),
        (["nowhere", "agreement"], "nowhere", 1),
        (["pairs.json", "agreement"], "pairs.json is a file", 2),
        (["gpt2", "agreement", "--kind", "oracle"], "--kind should be one of classifier, causal, masked", 2),
    ],
)
def test_wrong_calls_are_one_line(place, capsys, monkeypatch, arguments, said, status):
    monkeypatch.chdir(place)
    found, line = refused(capsys, ["explain", *arguments, "--out", "unmade", "--json"])
    assert said in line
    assert found == status
    assert not (place / "unmade").exists()


def test_an_interrupted_explanation_leaves_nothing(place, capsys, monkeypatch):
    monkeypatch.chdir(place)

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(explanation_module, "faithfulness", interrupted)
    arguments = ["explain", "gpt2", "agreement", "--data", "pairs.json", "--out", "unmade", "--json"]
    assert refused(capsys, arguments) == (
        130,
        "qkov: interrupted; no file was left half written; run the same command again to finish",
    )
    assert not (place / "unmade").exists()


def test_typed_settings_are_the_settings():
    typed = ExplainOptions("all", "5,50", "attention", "standard", None, "max", "label", 3, 7, 100)
    settings = typed.settings("agreement", residual_stream=False)
    assert settings.methods[0] == "rollout"
    assert settings.methods[-1] == "random"
    assert "integrated gradients" in settings.methods
    assert settings.rollout.residual == 0
    assert settings.rollout.heads == "max"
    assert settings.perturbation.cuts == (0.05, 0.5)
    assert settings.perturbation.removal == "attention mask"
    assert (settings.target, settings.draws, settings.seed, settings.batch_tokens) == ("label", 3, 7, 100)
    assert typed.settings("agreement", residual_stream=True).rollout.residual == 0.5
    paper = ExplainOptions(None, None, "delete", "paper", None, "mean", "predicted", 5, 0, 100)
    assert paper.settings("hatexplain", residual_stream=True).paper_readout.pad_mask is False
    assert paper.settings("agreement", residual_stream=True).perturbation.convention == "paper"


def test_options_of_a_task_are_json_or_text():
    assert task_options(["attractors=[0, 2]", "verb-in-input=true", "phrase=both"]) == {
        "attractors": [0, 2],
        "verb_in_input": True,
        "phrase": "both",
    }


def blended(colour: str, share: float, page: str) -> str:
    over, under = ([int(value[place : place + 2], 16) for place in (1, 3, 5)] for value in (colour, page))
    return "rgb({}, {}, {})".format(*(round(share * a + (1 - share) * b) for a, b in zip(over, under, strict=True)))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [500, 1200], ids=["phone", "desk"])
def test_in_a_browser(chromium, explained, tmp_path, width, dark):
    facts = in_browser(chromium, explained / "report.html", tmp_path, width, dark)
    assert facts["requests"] == 0
    assert facts["scrollWidth"] <= facts["width"]
    assert facts["narrowest"] > 250
    ink = luminance(facts["color"])
    source = (explained / "report.html").read_text()
    paper, shade = (re.findall(rf"--{name}: (#\w{{6}});", source)[int(dark)] for name in ("paper", "shade"))
    # Of a heat map's strongest cell, and of a text's strongest token.
    for behind in (blended(COLOURS[0], STRONGEST, paper), blended(shade, 1.0, paper)):
        lighter, darker = max(ink, luminance(behind)), min(ink, luminance(behind))
        assert (lighter + 0.05) / (darker + 0.05) > 4.5
