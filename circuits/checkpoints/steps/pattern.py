"""Patterns in which the caller says where the step is in the names of a run, such as `A_1_1_{step}.pt`."""

import re
from collections.abc import Sequence

from ...errors import CallError
from .numbers import NUMBER, whole_number
from .step import Step

#: What a pattern may contain besides plain text, and what it stands for.
_PLACEHOLDERS = {
    # A number of three digits and more groups of three is one number here: the caller says that it is the step.
    "{step}": rf"\d{{1,3}}(?:_\d{{3}})+|{NUMBER}|(?i:init|initial)",
    "{layer}": r"\d{1,9}",
    "{head}": r"\d{1,9}",
    "*": r"[^/]*?",
}
#: Every further one multiplies the time that it takes to see that a name does not fit.
_MOST_STARS = 3
_PARTS = ("{layer}", "{head}")
_TOKEN = re.compile(r"(\{[^{}]*\}|\*)")
_FIXED = re.compile(r"(?P<name>.+)=(?P<step>[^=/]+)", re.DOTALL)

#: What a part of a name stands for, by placeholder.
Captured = dict[str, str]


class StepPattern:
    """A pattern for the names of a run's files or folders; everything in it but the placeholders stands for itself.

    `{step}` stands for the step, or for "init", which is step 0; `*` for any text; `{layer}` and `{head}` for numbers,
    where one step is spread over several files. `/` stands between a folder and a name in it. `NAME=STEP` states the
    step of a name without `{step}`, as in `untrained.pt=0`.

    Attributes:
        text: The pattern as it was written.
        parts: The placeholders among `{layer}` and `{head}` that it contains.
    """

    def __init__(self, text: str) -> None:
        """Read a pattern.

        Raises:
            CallError: It says of no name which step it is of, or contains another placeholder.
        """
        self.text, pattern = text, text
        self._fixed: int | None = None
        if "{step}" not in text:
            stated = _FIXED.fullmatch(text)
            self._fixed = None if stated is None else whole_number(stated["step"])
            if stated is None or self._fixed is None:
                raise CallError(
                    f"the pattern {text!r} says no step: expected {{step}} in place of the number, as in "
                    f"'A_1_1_{{step}}.pt', or the step of one name, as in 'untrained.pt=0'"
                )
            pattern = stated["name"]
        self.parts = tuple(placeholder for placeholder in _PARTS if placeholder in pattern)
        self._levels = [self._compiled(level) for level in pattern.strip("/").split("/")]

    @property
    def depth(self) -> int:
        """How many names, one in the other, the pattern covers."""
        return len(self._levels)

    def fit(self, level: int, name: str, above: Captured) -> Captured | None:
        """Return what the placeholders stand for if a name fits, or None.

        Args:
            level: How many folders the name is below the run.
            name: The name.
            above: What the placeholders stand for in the names of the folders above.
        """
        match = self._levels[level].fullmatch(name)
        if match is None:
            return None
        captured = {f"{{{key}}}": value for key, value in match.groupdict().items()}
        return None if any(above.get(key, value) != value for key, value in captured.items()) else above | captured

    def step(self, captured: Captured, name: str) -> Step:
        """Return the step of a name that fits.

        Args:
            captured: What the placeholders stand for.
            name: The name, for the message.

        Raises:
            CallError: What stands in place of the step is not a whole number.
        """
        origin = f"the pattern {self.text!r}"
        if self._fixed is not None:
            return Step(self._fixed, origin)
        text = captured["{step}"]
        if text.lower().startswith("init"):
            return Step(0, f"{text!r} in the pattern {self.text!r}")
        number = whole_number(text if "_" not in text else text.replace("_", ""))
        if number is None:
            raise CallError(
                f"{name} has {text!r} where the pattern {self.text!r} has {{step}}; expected a whole number, such as "
                f"500, 10k or 1e5"
            )
        return Step(number, origin)

    def part(self, captured: Captured) -> tuple[int, ...]:
        """Return the numbers of the layer and of the head that a name stands for, as far as the pattern has them."""
        return tuple(int(captured[placeholder]) for placeholder in self.parts)

    def _compiled(self, level: str) -> re.Pattern[str]:
        if level.count("*") > _MOST_STARS:
            raise CallError(f"the pattern {self.text!r} has more than {_MOST_STARS} times * in a name; expected fewer")
        expression, seen = "", set()
        for token in _TOKEN.split(level):
            if token in seen:
                expression += f"(?P={token[1:-1]})"
            elif token in _PLACEHOLDERS and token != "*":
                seen.add(token)
                expression += f"(?P<{token[1:-1]}>{_PLACEHOLDERS[token]})"
            elif token == "*":
                expression += _PLACEHOLDERS[token]
            elif _TOKEN.fullmatch(token):
                raise CallError(
                    f"the pattern {self.text!r} contains {token}; expected {{step}}, {{layer}}, {{head}} or *"
                )
            else:
                expression += re.escape(token)
        return re.compile(expression, re.DOTALL)


def step_patterns(step: str | Sequence[str] | None) -> tuple[StepPattern, ...]:
    """Return the patterns that a caller states, of which there may be none, one or several.

    Raises:
        CallError: One of them says no step.
    """
    if step is None:
        return ()
    return tuple(StepPattern(text) for text in ([step] if isinstance(step, str) else step))
