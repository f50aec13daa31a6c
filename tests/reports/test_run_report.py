"""The report of tracked runs: what it draws and prints is what the store holds."""

import re

import numpy as np
import pytest
import torch
from qkov.analyses.trajectories.track import track
from qkov.circuits.attention_weights import AttentionWeights
from qkov.circuits.errors import CallError
from qkov.circuits.saved_format import save_checkpoint
from qkov.reports import run_report
from qkov.reports.page import number
from qkov.reports.panels import Panel
from qkov.reports.panels import draw as draw_panel
from qkov.reports.run_report import write_run_report


def store_of(folder, steps, layers=1, heads=2):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        written = []
        for layer in range(layers):
            shapes = {"W_Q": (6, 3), "W_K": (6, 3), "W_V": (6, 3), "W_O": (3, 6)}
            drawn = {name: torch.randn(heads, *shape, generator=generator) for name, shape in shapes.items()}
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
        "2 circuits hold NaN or infinite weights and have no figures: step 0, layer 0, head 0, W<sub>QK</sub>" in page
    )
    store.path(10).unlink()
    page = write_run_report([store], tmp_path / "a.html", "qkov").read_text()
    assert "1 of the run's 2 checkpoints are not measured yet" in page


def test_runs_are_told_apart(tmp_path):
    stores = [store_of(tmp_path / name, (0, 10)) for name in ("a", "b")]
    page = write_run_report(stores, tmp_path / "both.html", "qkov").read_text()
    assert "a/store" in page
    assert "b/store" in page
    with pytest.raises(CallError, match="the same run store was given twice"):
        write_run_report([stores[0], stores[0]], tmp_path / "twice.html", "qkov")
    with pytest.raises(CallError, match="at least one run store"):
        write_run_report([], tmp_path / "none.html", "qkov")
