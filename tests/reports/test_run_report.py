"""The report of tracked runs: what it draws and prints is what the store holds."""

import html
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from qkov.analyses.trajectories import track
from qkov.circuits import AttentionWeights, CallError, open_checkpoint
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.reports.drawing.panels import Panel
from qkov.reports.drawing.panels import draw as draw_panel
from qkov.reports.pages import run_report
from qkov.reports.pages.page import number
from qkov.reports.pages.run_report import write_run_report
from safetensors.torch import save_file


def store_of(folder, steps, layers=1, heads=2):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        written = []
        for layer in range(layers):
            shapes = {"W_Q": (6, 3), "W_K": (6, 3), "W_V": (6, 3), "W_O": (3, 6)}
            drawn: dict[str, Any] = {
                name: torch.randn(heads, *shape, generator=generator) for name, shape in shapes.items()
            }
            written.append(AttentionWeights(layer=layer, **drawn))
        save_checkpoint(folder / "run", step, written, {"loss": 1.0 / (1 + step), "rate": step % 7 + 1.0}, {})
    return track(folder / "run", folder / "store").store


@pytest.fixture
def drawn(monkeypatch) -> list[Panel]:
    """Every panel that a report draws."""
    panels: list[Panel] = []

    def draw(panel: Panel, **options):
        panels.append(panel)
        return draw_panel(panel, **options)

    monkeypatch.setattr(run_report, "draw", draw)
    return panels


def titled(panels: list[Panel], *words: str) -> Panel:
    (found,) = (panel for panel in panels if all(word in panel.title for word in words))
    return found


def test_lines_are_the_stores_figures_head_by_head(tmp_path, drawn):
    store = store_of(tmp_path, (0, 10, 20, 30))
    write_run_report([store], tmp_path / "a.html", "qkov")
    table = store.table()
    panel = titled(drawn, "{QK}", "nuclear norm")
    assert len(panel.series) == 2
    for head, series in enumerate(panel.series):
        rows = table[(table["circuit"] == "QK") & (table["head"] == head)]
        assert list(series.x) == [0, 10, 20, 30]
        np.testing.assert_array_equal(series.y, rows["nuclear_norm"])
        assert series.band is None


def test_many_heads_are_gathered_with_their_quartiles(tmp_path, drawn):
    store = store_of(tmp_path, (0, 10), layers=2, heads=5)
    write_run_report([store], tmp_path / "a.html", "qkov")
    table = store.table()
    panel = titled(drawn, "{OV}", "stable rank")
    assert len(panel.series) == 2
    rows = table[(table["circuit"] == "OV") & (table["layer"] == 1) & (table["step"] == 10)]["stable_rank"]
    assert panel.series[1].y[1] == pytest.approx(np.median(rows))
    assert panel.series[1].band is not None
    assert panel.series[1].band[0][1] == pytest.approx(np.quantile(rows, 0.25))
    assert panel.series[1].band[1][1] == pytest.approx(np.quantile(rows, 0.75))


@pytest.mark.parametrize(("steps", "logarithmic"), [((1, 500, 1000, 1500, 2000), False), ((0, 1, 10, 100, 1000), True)])
def test_steps_spaced_by_factors_are_drawn_so(tmp_path, drawn, steps, logarithmic):
    write_run_report([store_of(tmp_path, steps)], tmp_path / "a.html", "qkov")
    assert titled(drawn, "{QK}", "Frobenius").x_log == logarithmic
    assert titled(drawn, "loss").x_log == logarithmic
    assert not titled(drawn, "{QK}", "singular values").x_log


def test_spectra_are_of_the_first_the_middle_and_the_last_step(tmp_path, drawn):
    store = store_of(tmp_path, (0, 10, 20, 30, 40), heads=1)
    write_run_report([store], tmp_path / "a.html", "qkov")
    table = store.table()
    panel = titled(drawn, "{OV}", "singular values")
    assert len(panel.series) == 3
    for step, series in zip((0, 20, 40), panel.series, strict=True):
        row = table[(table["circuit"] == "OV") & (table["step"] == step)].iloc[0]
        np.testing.assert_array_equal(series.y, row["singular_values"])


def test_the_table_is_of_the_last_checkpoint(tmp_path):
    store = store_of(tmp_path, (0, 10, 20))
    page = write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    body = page[page.index("The last checkpoint, head by head") :]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", body, flags=re.DOTALL)]
    last = store.table().query("step == 20").to_dict("records")
    assert len(rows) == len(last) == 4
    for cells, row in zip(rows, last, strict=True):
        assert cells[:3] == [str(row["layer"]), str(row["head"]), f"W<sub>{row['circuit']}</sub>"]
        assert cells[3] == number(row["frobenius_norm"])
        assert cells[4] == number(row["spectral_norm"])
        assert cells[-1] == number(row["copying_score"])


def test_damaged_heads_and_missing_checkpoints_are_said(tmp_path):
    store = store_of(tmp_path, (0, 10))
    broken = AttentionWeights(layer=0, W_Q=torch.full((2, 6, 3), torch.nan), W_K=torch.full((2, 6, 3), torch.nan))
    save_checkpoint(tmp_path / "broken", 0, [broken], {}, {})
    page = write_run_report([track(tmp_path / "broken", tmp_path / "b").store], tmp_path / "b.html", "qkov").read_text()
    assert (
        "2 circuits hold NaN or infinite weights and were not measured: step 0, layer 0, head 0, W<sub>QK</sub>" in page
    )
    store.path(10).unlink()
    page = write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    assert "1 of the run's 2 checkpoints are not measured yet" in page


def model_folder(folder, config, shapes):
    """A model as transformers saves it, of random weights."""
    generator = torch.Generator().manual_seed(len(config))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def qwen3_folder(folder):
    sizes = {"q_proj": (24, 10), "k_proj": (12, 10), "v_proj": (12, 10), "o_proj": (10, 24)}
    shapes = {f"layers.{layer}.self_attn.{name}.weight": size for layer in range(2) for name, size in sizes.items()}
    shapes |= {f"layers.{layer}.self_attn.{side}_norm.weight": (6,) for layer in range(2) for side in "qk"}
    shapes |= {f"layers.{layer}.input_layernorm.weight": (10,) for layer in range(2)}
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    config |= {"hidden_size": 10, "num_hidden_layers": 2, "rope_theta": 100.0, "rms_norm_eps": 1e-6}
    return model_folder(folder, config, shapes)


def nanogpt_fork(path, bias: bool):
    """A fork of nanoGPT without absolute positions, and with or without the bias of its LayerNorm."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"transformer.wte": (10, 8), "transformer.h.0.attn.c_attn": (24, 8), "transformer.h.0.attn.c_proj": (8, 8)}
    state = {f"{name}.weight": torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    state["transformer.h.0.ln_1.weight"] = torch.ones(8)
    if bias:
        state |= {"transformer.h.0.ln_1.bias": torch.zeros(8), "transformer.wpe.weight": torch.zeros(16, 8)}
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": bias, "vocab_size": 10}
    torch.save({"model": state, "model_args": sizes}, path)
    return path


@pytest.mark.parametrize("is_a_fork", [True, False])
def test_what_the_weights_contradict_is_said_to_be_unknown(tmp_path, is_a_fork):
    checkpoint = nanogpt_fork(tmp_path / "ckpt.pt", bias=not is_a_fork)
    store = track(checkpoint, tmp_path / "store").store
    page = html.unescape(write_run_report([store], tmp_path / "a.html", "qkov").read_text())
    doubts = dict(open_checkpoint(checkpoint).doubts)
    assert bool(doubts) is is_a_fork
    assert ("Unknown: " in page) is is_a_fork
    for what, reason in doubts.items():
        assert f"{what}: {reason}" in page


def t5_folder(folder):
    block = "{}.block.0.layer.{}.{}.{}.weight"
    attentions = (("encoder", 0, "SelfAttention"), ("decoder", 0, "SelfAttention"), ("decoder", 1, "EncDecAttention"))
    shapes = {block.format(*attention, side): (8, 8) for attention in attentions for side in "qkvo"}
    shapes |= {f"{stack}.block.0.layer.{number}.layer_norm.weight": (8,) for stack, number, _ in attentions}
    config = {"model_type": "t5", "d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    return model_folder(folder, config, shapes)


def test_what_kind_of_attention_it_is_is_said(tmp_path, drawn):
    run = qwen3_folder(tmp_path / "run" / "checkpoint-5").parent
    (run / "checkpoint-9").mkdir()
    store = track(run, tmp_path / "store", basis="folded", rotary_offset=3, composition=True).store
    page = write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    assert "Queries and keys are normalised (QK-norm): the size of W<sub>QK</sub> does not affect the scores" in page
    assert "Up to 2 query heads share their keys and values." in page
    assert "weights with the norm in front of attention folded in;" in page
    assert "W<sub>QK</sub> at offset 3, query position minus key position" in page
    assert "Left out: checkpoint-9: holds no weights (yet)." in page
    assert f"<dt>recognised</dt><dd>{store.description()['recognised']}</dd>" in html.unescape(page)
    panel = titled(drawn, "relative to offset 0")
    rows = store.table().query("circuit == 'QK'")
    expected = np.median([row[1:] / row[0] for row in rows["frobenius_norm_at_offsets"]], axis=0)
    np.testing.assert_allclose(panel.series[0].y, expected)
    assert list(panel.series[0].x) == [2**power for power in range(11)]


def test_one_checkpoint_is_drawn_over_its_layers(tmp_path, drawn):
    store = track(qwen3_folder(tmp_path / "model"), tmp_path / "store").store
    assert "<h1>Circuits of a model</h1>" in write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    panel = titled(drawn, "{OV}", "Frobenius")
    (line,) = panel.series
    rows = store.table().query("circuit == 'OV'")
    assert panel.x_label == "layer"
    assert list(line.x) == [0, 1]
    np.testing.assert_allclose(line.y, [rows[rows["layer"] == layer]["frobenius_norm"].median() for layer in (0, 1)])


def test_the_strongest_compositions_stand_beside_chance(tmp_path):
    store = track(qwen3_folder(tmp_path / "model"), tmp_path / "store", composition=True).store
    page = write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    body = page[page.index("Which heads compose?") : page.index("The last checkpoint, head by head")]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", body, flags=re.DOTALL)]
    scores = store.composition(None)
    assert len(rows) == 3 * 5
    for kind, reads, start in (("Q", "queries", 0), ("K", "keys", 5), ("V", "values", 10)):
        best = scores[scores["kind"] == kind].sort_values("score", ascending=False).iloc[0]
        places = [f"layer {best[f'{when}_layer']}, head {best[f'{when}_head']}" for when in ("earlier", "later")]
        times = number(best["score"] * 10**0.5, 3)
        assert rows[start] == [reads, *places, number(best["score"], 3), number(10**-0.5, 3), times]
    plain = track(qwen3_folder(tmp_path / "other"), tmp_path / "plain").store
    assert "Which heads compose?" not in write_run_report([plain], tmp_path / "b.html", "qkov").read_text()


def test_stacks_are_told_apart(tmp_path, drawn):
    store = track(t5_folder(tmp_path / "model"), tmp_path / "store").store
    page = write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    assert "3 layers (decoder, decoder cross, encoder), 6 heads in all." in page
    assert "<span>decoder cross layer 0, head 1</span>" in page
    assert '<th class="left">stack</th>' in page
    assert len(titled(drawn, "{OV}", "Frobenius").series) == 6
    assert not [panel for panel in drawn if "relative to offset 0" in panel.title]


def test_runs_are_told_apart(tmp_path):
    stores = [store_of(tmp_path / name, (0, 10)) for name in ("a", "b")]
    page = write_run_report(stores, tmp_path / "both.html", "qkov").read_text()
    assert "a/store" in page
    assert "b/store" in page
    with pytest.raises(CallError, match="the same run store was given twice"):
        write_run_report([stores[0], stores[0]], tmp_path / "twice.html", "qkov")
    with pytest.raises(CallError, match="at least one run store"):
        write_run_report([], tmp_path / "none.html", "qkov")


def test_stores_are_named_by_their_folders_too_and_no_command_is_told_where_there_was_none(tmp_path):
    store = store_of(tmp_path, [0, 1, 2])
    page = write_run_report([str(store.folder)], str(tmp_path / "a.html")).read_text()
    assert "<dt>command</dt>" not in page
    told = write_run_report([store], tmp_path / "b.html", "qkov report").read_text()
    assert "<dt>command</dt><dd><code>qkov report</code></dd>" in told
    assert page.count("<svg") == told.count("<svg") > 5
