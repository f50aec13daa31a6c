"""The README and the pages of docs/ are true: their code and commands run, and their outputs are what is printed."""

import doctest
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.reports.commands.families import families_lines

from .pages import PAGES, ROOT, blocks, commands
from .running import Reader

README = PAGES["README.md"].read_text()
#: `...` in a page stands for anything.
SAME = doctest.OutputChecker().check_output
#: Pages with nothing to run.
TALK_ONLY = {
    "docs/index.md",
    "docs/conventions.md",
    "docs/formats.md",
    "docs/speed.md",
    "docs/limits.md",
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader") / "scratch")


# PEFT looks at an attribute of transformers' models that warns.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted(set(PAGES) - TALK_ONLY))
def test_what_the_page_says_to_type_works(name, reader, tmp_path):
    ran = 0
    for _, command, printed in reader.read(PAGES[name].read_text(), tmp_path / "here"):
        ran += 1
        if command is not None and command.output is not None:
            assert SAME(command.output, printed, doctest.ELLIPSIS), f"qkov {' '.join(command.words)}:\n{printed}"
    assert ran or name.startswith("docs/api/")


@pytest.mark.parametrize("name", sorted(TALK_ONLY))
def test_pages_that_only_talk_have_nothing_to_run(name):
    languages = {block.language for block in blocks(PAGES[name].read_text())}
    assert languages.isdisjoint({"python", "console", "toml", "sh"})


@pytest.mark.parametrize(
    "table", [block.text for page in PAGES.values() for block in blocks(page.read_text()) if block.language == "toml"]
)
def test_mappings_on_the_pages_name_a_circuit_of_a_layer(table):
    mapping = parse_mapping(tomllib.loads(table), "the page")
    assert {"Q", "K"} <= set(mapping.tensors) or "QKV" in mapping.tensors
    assert all("{layer}" in name for name in mapping.tensors.values())


def test_every_command_is_on_a_page():
    typed = {
        command.words[0]
        for page in PAGES.values()
        for block in blocks(page.read_text())
        if block.language in ("sh", "console")
        for command in commands(block)
        if command.words
    }
    assert {"reproduce", "predict", "inspect", "track", "explain", "report", "families"} <= typed


def test_the_numbers_on_the_page_of_theory_are_those_of_the_code():
    (code,) = (block.text for block in blocks(PAGES["docs/theory.md"].read_text()) if block.language == "python")
    names: dict = {}
    exec(code, names)
    solution = names["at_loss"](names["setting"], names["Parameterization"].CACO, r=0.01, loss=1e-4)
    (comment,) = re.findall(r"loss=1e-4\)  # (mu_qk .*)", code)
    assert comment == f"mu_qk {solution.mu_qk:.4g}, mu_ov {solution.mu_ov:.4g}, attention {solution.attention:.4g}"
    fits = names["fit_ratio"](names["flow"].mu_ov, names["flow"].mu_qk, names["setting"])
    assert fits.best is names["Parameterization"].FAFO


def test_the_table_of_families_is_made_from_the_data():
    (stated,) = re.findall(
        r"<!-- families -->\n(.*)<!-- /families -->", PAGES["docs/families.md"].read_text(), re.DOTALL
    )
    assert stated.strip().splitlines() == families_lines()


def test_the_two_commands_are_where_ci_looks():
    for mark, ending in (("main", ".venv/bin/qkov reproduce"), ("test", ".venv/bin/pytest")):
        command = re.search(rf"^<!-- {mark} command -->\n```sh\n(.+)\n```$", README, flags=re.MULTILINE)
        assert command
        assert command[1].endswith(ending)


def test_the_readme_is_short():
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)|<!--.*?-->", " ", prose)
    assert len(re.findall(r"\w[\w'’.-]*", prose)) <= 600


def test_links_between_pages_lead_somewhere():
    for name, path in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert (path.parent / target).exists(), f"{name} links to {target}"


def test_the_citation_names_the_version_and_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert cited["version"] == pyproject["project"]["version"]
    assert cited["license"] == pyproject["project"]["license"]
    assert "2608.06776" in str(cited["references"])


def test_the_picture_is_that_of_a_page():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    content = (ROOT / Path(picture)).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 400_000
