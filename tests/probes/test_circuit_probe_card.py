"""What a notebook shows for a CircuitProbe: loss, norms and r(t) as numbers and curves, escaped, in every state."""

import html
import math
import re

import numpy as np
import pytest
import torch
from qkov.probes import CircuitProbe
from qkov.probes.training import circuit_probe
from qkov.probes.training.history import History

from .circuit_models import Classifier, language_loss, language_model, loss_of


def rows_of(card: str) -> dict[str, tuple[str, str, str, str]]:
    """The first and the last value, the path and the largest head of each figure."""
    found = re.findall(
        r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>\s*<td><svg.*?<path d="(.*?)".*?</td><td>(.*?)</td>',
        card,
        re.DOTALL,
    )
    return {html.unescape(title): tuple(rest) for title, *rest in found}


def trained(model, loss, steps: int, **options) -> CircuitProbe:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = CircuitProbe(model, every=1, optimizer=optimizer, **options)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model, step).backward()
        probe.note(loss=4.0 - step)
        optimizer.step()
    return probe


def test_the_card_shows_the_first_and_the_last_values_of_the_table():
    probe = trained(language_model("gpt2"), language_loss, 3)
    rows, table = rows_of(probe._repr_html_()), probe.table()
    assert list(rows) == ["loss", "norm of W_QK, median", "norm of W_OV, median", "effective ratio r(t), median"]
    # From step 1, since the start has no loss: 3, 2, 1 over a width of 240 and a height of 30 with margins of 2.
    assert rows["loss"] == ("3", "1", "M0 2L120 15L240 28", "")
    for circuit in ("QK", "OV"):
        norms = table[table["circuit"] == circuit].groupby("step")["frobenius_norm"].median()
        first, last, path, largest = rows[f"norm of W_{circuit}, median"]
        assert (first, last) == (f"{norms[0]:.4g}", f"{norms[3]:.4g}")
        shares = (norms - norms.min()) / (norms.max() - norms.min())
        expected = [(round(80 * step), round(28 - 26 * share)) for step, share in shares.items()]
        assert [tuple(map(int, point.split())) for point in path[1:].split("L")] == expected
        of_last = table[(table["circuit"] == circuit) & (table["step"] == 3)]
        top = of_last.sort_values("frobenius_norm").to_dict("records")[-1]
        assert largest == f"{top['frobenius_norm']:.4g} in layer {top['layer']}, head {top['head']}"
    assert "step 3 · last logged step 3" in probe._repr_html_()
    assert "failures" not in probe._repr_html_()


def test_a_probe_that_has_only_begun_shows_its_start():
    card = CircuitProbe(Classifier())._repr_html_()
    rows = rows_of(card)
    assert list(rows) == ["norm of W_QK, median", "norm of W_OV, median"]
    assert rows["norm of W_QK, median"][2] == "M0 15H240"
    assert "step 0" in card


def test_a_loss_that_follows_and_largest_scores_are_shown_where_they_are_known():
    probe = trained(Classifier(), loss_of, 1)
    probe.add_scalars(1, loss=0.125)
    assert rows_of(probe._repr_html_())["loss"][1] == "0.125"
    history = History()
    scores = {0: [1.0, 2.0], 1: [math.nan, 64.0], 2: [None, None]}
    for step, of_heads in scores.items():
        history.add(
            step,
            [
                {"stack": "", "layer": 3, "head": head, "circuit": "QK", "max_logit": value}
                for head, value in enumerate(of_heads)
            ],
        )
        if step == 1:
            (curve,) = history.curves()
            assert curve.values == {0: 2.0, 1: 64.0}
            assert curve.largest == "64 in layer 3, head 1"
    (curve,) = history.curves()
    assert curve.values == {0: 2.0, 1: 64.0}
    assert curve.largest == ""


def test_of_many_steps_a_bounded_number_is_kept_with_the_first_and_the_last():
    history, kept = History(), []
    for step in range(5000):
        history.add(step, [{"circuit": "QK", "training_loss": float(step)}])
        kept = list(history.curves()[0].values)
        assert len(kept) <= 401
        assert (kept[0], kept[-1]) == (0, step)
    # 5000 steps, of which every 16th is kept.
    assert set(np.diff(kept[:-1])) == {16}
    assert len(kept) == 5000 // 16 + 2


def test_names_and_failures_are_escaped():
    def fail(step: int, values: dict[str, float]) -> None:
        del values
        if step:
            raise ConnectionError("<script>alert(1)</script>")

    with pytest.warns(UserWarning, match="logging step 1 failed"):
        probe = trained(Classifier(), loss_of, 2, log=fail)
    card = probe._repr_html_()
    assert "2 failures; the last: ConnectionError: &lt;script&gt;alert(1)&lt;/script&gt;" in card
    assert "<script" not in card


def test_a_probe_beside_the_first_process_says_that_it_measures_nothing(monkeypatch):
    monkeypatch.setattr(circuit_probe, "_is_beside_the_first", lambda: True)
    card = CircuitProbe(Classifier())._repr_html_()
    assert "it measures nothing: the first process does" in card
    assert "<table" not in card
