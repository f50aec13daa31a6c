"""Pages and panels: numbers as they are printed, nothing fetched, nothing unescaped, ids that are apart."""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import Markup
from qkov.reports.drawing.panels import Panel, Series, around_a_constant, draw, swatch
from qkov.reports.pages.page import cosine, listed, mark_changes, number, percent, subscripts


@pytest.mark.parametrize(
    ("value", "digits", "printed"),
    [
        (0.14882971, 4, "0.1488"),
        (81.6687, 5, "81.669"),
        (-0.5, 2, "−0.50"),
        (123456.0, 4, "123500"),
        (16341.0, 5, "16341"),
        (2.5539e8, 4, "2.554 × 10⁸"),
        (9.99, 2, "10"),
        (0.09996, 3, "0.100"),
        (5.36e-5, 2, "5.4 × 10⁻⁵"),
        (1e-8, 1, "1 × 10⁻⁸"),
        (0.0001, 1, "0.0001"),
        (0.0, 4, "0"),
        (math.nan, 4, "–"),
        (None, 4, "–"),
        (math.inf, 4, "∞"),
        (-math.inf, 4, "−∞"),
    ],
)
def test_numbers_are_printed_to_significant_digits(value, digits, printed):
    assert number(value, digits) == printed


def test_other_forms():
    assert percent(0.00493) == "0.49 %"
    assert percent(math.nan) == "–"
    assert cosine(0.9999996) == "1.000000"
    assert cosine(math.nan) == "–"
    assert listed((0.01, 1.0, 100.0)) == "0.01, 1 and 100"
    assert listed((2.0,)) == "2"
    assert subscripts("W_QK & μ_OV of a_b") == "W<sub>QK</sub> &amp; μ<sub>OV</sub> of a_b"
    assert subscripts("(CᵀC)^½") == "(CᵀC)<sup>½</sup>"
    rows = mark_changes([{"a": 1}, {"a": 1}, {"a": 2}], "a")
    assert [row["first"] for row in rows] == [False, False, True]


def panel(**changes):
    series = [Series([1.0, 2.0, math.nan], [1.0, 4.0, 9.0]), Series(np.array([1.5]), np.array([2.0]), 1, dots=True)]
    return Panel("a title", 'what "it" <shows>', "x", "y", series, **changes)


def test_a_panel_is_inline_and_follows_the_pages_colours():
    drawn = draw(panel(levels=((2.0, "level"),), y_log=True))
    assert isinstance(drawn, Markup)
    assert drawn.startswith('<svg role="img" aria-label="what &#34;it&#34; &lt;shows&gt;"')
    assert "currentColor" in drawn
    assert "#010203" not in drawn
    assert not re.search(r"#000000|black|white|#ffffff", drawn)
    assert "<metadata" not in drawn


def test_rounding_is_not_magnified():
    def limits(*values, **changes):
        return around_a_constant(Panel("t", "d", "x", "y", [Series(np.arange(3.0), np.array(values))], **changes))

    assert limits(4.0, 4.0 - 1e-12, 4.0) == pytest.approx((3.6, 4.4))
    assert limits(0.0, 0.0, math.nan) == (-1.0, 1.0)
    assert limits(4.0, 4.1, 4.0) is None
    assert limits(4.0, 4.0, 4.0, y_limits=(0.0, None)) is None
    assert limits(math.nan, math.nan, math.nan) is None


def test_panels_on_one_page_share_no_id():
    ids = [set(re.findall(r'\bid="([^"]+)"', draw(panel()))) for _ in range(2)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for drawn in (draw(panel()), draw(panel())):
        used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', drawn))
        assert {one or other for one, other in used} <= set(re.findall(r'\bid="([^"]+)"', drawn))


def test_a_swatch_shows_what_it_is_asked_to():
    assert "<circle" in swatch(0)
    assert "M0 7H28" in swatch(0)
    assert "M0 7H28" not in swatch(0, line=False)
    assert "<circle" not in swatch(0, dots=False)
    assert 'fill="none"' in swatch(0, hollow=True)


class References(HTMLParser):
    """Every address that a browser would fetch from, and every tag that should not be there."""

    def __init__(self):
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in {"src", "srcset", "href", "xlink:href", "data", "poster", "action"} and value:
                self.fetched.append(value)


def references(page: str) -> References:
    parser = References()
    parser.feed(page)
    return parser
