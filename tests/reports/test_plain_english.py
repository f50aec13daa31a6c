"""What people read is ordinary English: the help of every command, and the messages of every package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from qkov.reports.commands.main import app
from typer.main import get_command

ROOT = Path(__file__).parents[2]
FOLDERS = ("circuits", "analyses", "probes", "reports")
#: Beginnings of the private dialect in which the help was once written.
RIDDLES = ("Of ", "That ", "Which ", "So many ")
#: "X is no Y", except in "there is no Y" and "is no longer".
NO = re.compile(r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! longer\b)")


def commands() -> dict[str, Any]:
    return getattr(get_command(app), "commands")  # noqa: B009 (typer declares less than it returns)


def helps() -> Iterator[tuple[str, str]]:
    """Every help text by the words that lead to it."""
    whole: Any = get_command(app)
    yield "qkov", whole.help
    for name, command in {"qkov": whole, **commands()}.items():
        yield name, command.help
        for parameter in command.params:
            yield f"{name} {parameter.name}", parameter.help


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every string literal by its line; {} stands for what an f-string fills in."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            filled = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, " ".join("".join(filled).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, " ".join(node.value.split())


@pytest.mark.parametrize(("words", "text"), list(helps()))
def test_help_texts_are_sentences(words, text):
    assert text
    assert not text.startswith(RIDDLES)
    assert text[0].isupper()
    assert text.endswith(".")


@pytest.mark.parametrize("words", list(commands()))
def test_the_list_of_commands_shows_whole_sentences(words):
    first = commands()[words].help.split("\n")[0]
    # Typer cuts longer ones off with an ellipsis.
    assert len(first) <= 65
    assert first.endswith(".")


def test_the_issues_own_examples_of_help_are_taken_literally():
    text = dict(helps())
    assert text["explain methods"] == (
        "Comma-separated attribution methods; the first is examined in detail; 'all' runs every method. "
        "Default: the fast ones."
    )
    assert text["explain limit"] == "Maximum number of examples, sampled with --seed; 0 uses all."
    assert text["track heads"] == (
        "Number of query heads, if it cannot be inferred from the config or the tensor shapes."
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_text_says_that_something_is_no_something(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    told = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files
        for line, text in texts(file.read_text(encoding="utf-8"))
        if NO.search(text)
    ]
    assert told == []


@pytest.mark.parametrize("page", sorted((ROOT / "reports/pages/templates").glob("*.j2")), ids=lambda path: path.name)
def test_no_page_says_so(page):
    assert NO.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("f'{name} is no PyTorch file'", True),
        ("'weights that are no matrix'", True),
        ("f'{a}' 'which was no folder'", True),
        ("'there is no such file'", False),
        ("'There are no checkpoints'", False),
        ("'the file is no longer there'", False),
        ("'this is not a folder'", False),
    ],
)
def test_the_form_is_recognised(text, found):
    assert any(NO.search(said) for _, said in texts(text)) == found
