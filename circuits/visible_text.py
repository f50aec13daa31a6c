"""Text from inputs as it may be printed: what would move the cursor, end the line or turn it around becomes visible."""

import re

#: Control characters, ends of lines and paragraphs, marks that change the direction of writing, halves of characters
#: (surrogates), and tags, which are not seen.
_HIDDEN = (
    r"\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e"
    r"\u2066-\u2069\ud800-\udfff\ufeff\U000e0000-\U000e007f"
)
_HIDDEN_ANYWHERE = re.compile(f"[{_HIDDEN}]")
#: A text of several lines keeps its lines, and right-to-left scripts the marks that only say which script it is.
_HIDDEN_IN_LINES = re.compile(f"(?![\\t\\n\\r\u061c\u200e\u200f])[{_HIDDEN}]")


def visible(text: str) -> str:
    r"""Return a text in one line, with escapes such as \n and \x1b in place of what would be hidden or act."""
    return _HIDDEN_ANYWHERE.sub(_escaped, text)


def visible_lines(text: str) -> str:
    r"""Return a text of several lines with escapes such as \x1b in place of what would be hidden or act."""
    return _HIDDEN_IN_LINES.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()
