"""The pages of the documentation, and the blocks of code and commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: what stands behind the opening fence.
        text: the lines between the fences, without the indentation of the fences.
        start: where the text begins in the page.
        stop: where it ends.
    """

    language: str
    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Command:
    """A command of a `sh` or `console` block, and what the page says that it prints (None for a `sh` block)."""

    words: tuple[str, ...]
    output: str | None


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page in order."""
    return [
        Block(
            match["language"], re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE), *match.span("text")
        )
        for match in _BLOCK.finditer(page)
    ]


def commands(block: Block) -> list[Command]:
    """Return the commands of a block that are calls of `qkov`, with comments and the path of an environment removed."""
    if block.language == "console":
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        typed = [(line, output) for line, _, output in (part.partition("\n") for part in parts)]
    else:
        typed = [(part, None) for line in block.text.splitlines() for part in line.split(" && ")]
    found = []
    for line, output in typed:
        words = shlex.split(line, comments=True)
        if words and Path(words[0]).name == "qkov":
            found.append(Command(tuple(words[1:]), output))
    return found
