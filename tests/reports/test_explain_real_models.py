"""`qkov explain` on trained models as they are published, against what transformers gives for the same sentences."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.attention import read_explanation
from qkov.analyses.tasks import TextExample
from qkov.analyses.tasks.agreement.sentences import agreement_sentences
from qkov.reports.commands.main import run


def sentences(limit: int, seed: int) -> list[TextExample]:
    task = agreement_sentences(limit, seed, attractors=(0, 1), verb_in_input=True)
    return [example for example in task.examples if isinstance(example, TextExample)]


@pytest.fixture(scope="module")
def classifier(minilm, tmp_path_factory):
    """MiniLM with a head that tells the number of the verb, trained on its frozen first token."""
    torch.manual_seed(0)
    tokeniser = transformers.AutoTokenizer.from_pretrained(minilm)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2)
    examples = sentences(300, seed=1)
    encoded = tokeniser([example.text for example in examples], padding=True, return_tensors="pt")
    with torch.no_grad():
        first = model.eval().bert(**encoded).last_hidden_state[:, :1]
    labels = torch.tensor([example.label for example in examples])
    head = [*model.bert.pooler.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.AdamW(head, lr=3e-3)
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(model.classifier(model.bert.pooler(first)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("minilm") / "classifier"
    model.save_pretrained(folder)
    tokeniser.save_pretrained(folder)
    return folder


def test_minilm_with_a_trained_head(classifier, tmp_path, capsys):
    options = ["--option", "verb_in_input=true", "--option", "attractors=[0, 1]", "--limit", "40", "--seed", "5"]
    methods = ["--methods", "last layer,attention x gradient,ablation,random", "--draws", "2", "--cuts", "20,50"]
    assert run(["explain", str(classifier), "agreement", *options, *methods, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    # Half of the sentences are plural.
    assert printed["accuracy"] > 0.75
    explanation = read_explanation(tmp_path)
    tokeniser = transformers.AutoTokenizer.from_pretrained(classifier)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        classifier, attn_implementation="eager"
    ).eval()
    for number, row in explanation.examples.head(8).iterrows():
        encoded = tokeniser(row["text"], return_tensors="pt")
        with torch.no_grad():
            found = model(**encoded, output_attentions=True)
        tokens = explanation.tokens[explanation.tokens["example"] == number]
        assert tokens["token"].tolist() == encoded["input_ids"][0].tolist()
        expected = found.attentions[-1][0, :, 0].mean(dim=0)
        np.testing.assert_allclose(tokens["last layer"], expected, atol=1e-5)
        words = row["text"].split(" ")
        marked = {row["text"][start:end] for start, end in tokens[tokens["relevance"] > 0][["start", "end"]].to_numpy()}
        assert marked <= {words[1], words[-1]} | {part for word in (words[1], words[-1]) for part in pieces(word)}
        on_relevant = float(expected[torch.tensor(tokens["relevance"].to_numpy() > 0)].sum())
        assert row["attention"] == pytest.approx(on_relevant, abs=1e-5)
        assert row["right"] == pytest.approx(float(found.logits[0].softmax(dim=0)[row["label"]]), abs=1e-5)


def pieces(word: str) -> set[str]:
    return {word[start:end] for start in range(len(word)) for end in range(start + 1, len(word) + 1)}


def test_smollm2_chooses_verb_forms(smollm2, smollm2_tokeniser, tmp_path, capsys):
    arguments = ["explain", str(smollm2), "agreement", "--kind", "causal", "--tokenizer", str(smollm2_tokeniser)]
    methods = ["--methods", "rollout,value norms,attention x gradient,random", "--draws", "2", "--cuts", "20,50"]
    assert run([*arguments, *methods, "--limit", "5", "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["accuracy"] >= 0.6
    explanation = read_explanation(tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokeniser = transformers.AutoTokenizer.from_pretrained(smollm2_tokeniser)
    row = explanation.examples.iloc[0]
    encoded = tokeniser(row["text"], return_tensors="pt")
    with torch.no_grad():
        found = model(**encoded, output_attentions=True)
    tokens = explanation.tokens[explanation.tokens["example"] == 0]
    rolled = torch.eye(len(tokens), dtype=torch.float64)
    for attention in found.attentions:
        mixed = attention[0].double().mean(dim=0) + torch.eye(len(tokens))
        rolled = mixed / mixed.sum(dim=-1, keepdim=True) @ rolled
    np.testing.assert_allclose(tokens["rollout"], rolled[-1], atol=1e-5)
    right, wrong = (tokeniser(row["text"] + form)["input_ids"][-1] for form in forms_of(row))
    two = found.logits[0, -1, [right, wrong]].softmax(dim=0)
    assert row["right"] == pytest.approx(float(two[0]), abs=1e-4)


def forms_of(row) -> tuple[str, ...]:
    (example,) = (one for one in agreement_sentences(5).examples if one.id == row["id"])
    assert isinstance(example, TextExample)
    return example.continuations
