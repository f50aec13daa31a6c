"""What people with transformers 4.57 do first: `qkov explain` on a BERT that it saved, TransformerLens beside it."""

import pandas as pd
import pytest
from qkov.circuits import CallError, open_model
from qkov.reports.commands.main import run

from ..analyses.tiny_models import MASKED
from ..reports.test_explain import saved, write_pairs


def test_a_bert_that_this_version_saved_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "bert", MASKED[0])
    pairs = write_pairs(tmp_path / "pairs.json")
    arguments = ["--methods", "rollout,random", "--cuts", "50", "--out", "out"]
    assert run(["explain", "bert", "agreement", "--data", str(pairs), *arguments]) == 0
    assert "report: out/report.html" in capsys.readouterr().out
    examples = pd.read_parquet(tmp_path / "out" / "examples.parquet")
    assert examples["attention"].between(0, 1).all()


def test_the_models_of_an_older_transformer_lens_are_refused_in_one_line():
    lens = pytest.importorskip("transformer_lens")
    if not hasattr(lens, "HookedTransformer"):
        pytest.skip("this TransformerLens has no HookedTransformer")
    config = lens.HookedTransformerConfig(
        d_model=8, d_head=4, n_heads=2, n_layers=1, n_ctx=8, d_vocab=8, attn_only=True
    )
    with pytest.raises(
        CallError, match=r"^HookedTransformer comes from TransformerLens 3\.2\.1, .*transformer-lens>=3\.9"
    ):
        open_model(lens.HookedTransformer(config))
