"""`python -m tests.documentation.update`: write what the commands print today into the pages' console blocks.

Outputs that a page shortens with `...` stay as they are, as long as they still fit.
"""

import doctest
import tempfile
from pathlib import Path

from qkov.reports.commands.families import families_lines

from .pages import PAGES
from .running import Reader


def main() -> None:
    """Run every page, and rewrite those whose outputs changed."""
    fits = doctest.OutputChecker().check_output
    with tempfile.TemporaryDirectory() as scratch:
        reader = Reader(Path(scratch) / "scratch")
        for number, (name, path) in enumerate(PAGES.items()):
            page = path.read_text()
            for _, command, printed in reader.read(page, Path(scratch) / str(number)):
                if command is None or command.output is None or fits(command.output, printed, doctest.ELLIPSIS):
                    continue
                page = page.replace(command.output, printed, 1)
                print(f"{name}: qkov {' '.join(command.words)}")
            path.write_text(page)
    families = PAGES["docs/families.md"]
    before, mark, rest = families.read_text().partition("<!-- families -->\n")
    _, end, after = rest.partition("<!-- /families -->")
    families.write_text(before + mark + "\n".join(families_lines()) + "\n" + end + after)


if __name__ == "__main__":
    main()
