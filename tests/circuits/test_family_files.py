"""Family files and mapping files: every key is described, and an unknown one is refused at every level."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from qkov.circuits import CallError, read_mapping
from qkov.circuits.architectures import schema
from qkov.circuits.architectures.families import architectures, parse_family, unsupported

PAGE = files("qkov.circuits.architectures").joinpath("families", "README.md").read_text(encoding="utf-8")
FACTS = schema.FACT_KEYS

#: The tables that the page describes, by the heading above each.
SECTIONS = {
    "Family file": schema.FAMILY,
    "Stack": schema.STACK,
    "Evidence": schema.EVIDENCE,
    "Tensors": schema.TENSORS,
    "Layout": schema.LAYOUT,
    "Facts": FACTS,
    "Rotary positions": FACTS["rotary"].keys,
    "Rotary scaling": schema.SCALING,
    "Norm": FACTS["norm"].keys,
    "Norm of queries and keys": FACTS["query_key_norm"].keys,
    "Case": schema.CONDITIONS,
    "Layers of a case": schema.LAYERS,
    "Look-up": schema.LOOK_UP,
    "Unsupported attention": schema.UNSUPPORTED,
    "Mapping file": schema.MAPPING,
}

FAMILY = """
title = "a family"
model_types = ["a"]

[[stacks]]
layout = "linear"
heads = { config = "n_head", default = 2 }
norm = { kind = "layer_norm", eps = 1e-5 }
rotary = { base = 10000.0, scaling = { rope_type = "linear", factor = { config = "factor" } } }

[stacks.tensors]
Q = "l.{layer}.q"
K = "l.{layer}.k"

[[stacks.cases]]
when = { model_type = "a" }
layers = { config = "layer_types", is = "local" }
window = 4
"""

MAPPING = """
heads = 2
norm = { kind = "layer_norm" }
rotary = { base = 10000.0, scaling = { rope_type = "linear", factor = 2.0 } }

[tensors]
Q = "l.{layer}.q"
K = "l.{layer}.k"

[layout]
Q = "(head d_head) d_model"
K = "(head d_head) d_model"
"""


def rows(section: str) -> list[list[str]]:
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| key | type | meaning | example |"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_page_describes_no_other_table():
    headings = re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    assert headings == list(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_described_with_its_type_and_an_example(section):
    keys = SECTIONS[section]
    described = rows(section)
    assert sorted(key for key, *_ in described) == sorted(f"`{key}`" for key in keys)
    for key, types, meaning, example in described:
        name = key.strip("`")
        assert types == " or ".join(keys[name].types), name
        assert meaning.endswith("."), name
        table = tomllib.loads(example.strip("`"))
        assert list(table) == [name]
        schema._check(table, keys, (), "the page")


def test_the_example_on_the_page_is_a_family():
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert parse_family("example", example).title == "My model"


def test_every_family_of_the_package_keeps_the_schema():
    assert len(architectures()) > 50
    assert unsupported()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "a family"', 'titel = "a family"', "families/a.toml has the unknown key 'titel'; known are title, "),
        ("heads = {", "haeds = {", r"\[\[stacks\]\] 1 of families/a.toml has the unknown key 'haeds'; .*heads"),
        ("window = 4", "windw = 4", r"\[\[stacks\]\] 1, \[\[cases\]\] 1 of .* unknown key 'windw'; .*window"),
        ("window = 4", "heads = 4", r"\[\[cases\]\] 1 of .* unknown key 'heads'"),
        ('is = "local"', 'si = "local"', r"\[\[cases\]\] 1, \[layers\] of .* unknown key 'si'; known are config, is, "),
        ("eps = 1e-5", "epsilon = 1e-5", r"\[norm\] of .* unknown key 'epsilon'; known are kind, eps, gain_offset"),
        ("base = ", "theta = ", r"\[rotary\] of .* unknown key 'theta'; known are pairing, .*base"),
        ('rope_type = "linear"', 'kind = "linear"', r"\[rotary\], \[scaling\] of .* unknown key 'kind'; .* rope_type"),
        ("default = 2", "defualt = 2", r"\[heads\] of .* unknown key 'defualt'; known are config, default, "),
        ('{ config = "factor" }', '{ config = "factor", by = 2 }', r"\[scaling\], \[factor\] of .* unknown key 'by'"),
        ('Q = "l', 'W_Q = "l', r"\[tensors\] of .* unknown key 'W_Q'; known are Q, K, V, O, QKV, "),
        ('layout = "linear"', 'layout = { W_Q = "" }', r"\[layout\] of .* unknown key 'W_Q'; known are Q, K, V, O, "),
        ("when = {", "wenn = {", r"unknown key 'wenn'; known are when, "),
        ("window = 4", 'window = "4"', r"window of .* should be of type integer or look-up or false, got '4'"),
        ('model_types = ["a"]', 'model_types = "a"', "model_types of .* should be of type list of strings, got 'a'"),
    ],
)
def test_a_family_file_with_an_unknown_key_is_refused(old, new, message):
    parse_family("a", FAMILY)
    assert old in FAMILY
    with pytest.raises(CallError, match=message):
        parse_family("a", FAMILY.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("heads = 2", "head = 2", "unknown key 'head'; known are tensors, layout, heads, "),
        (
            "heads = 2",
            'heads = { config = "n_head" }',
            "heads of .* should be of type integer or list of integers, got",
        ),
        ("heads = 2", "heads = 2\nnumber_of_layers = 3", "unknown key 'number_of_layers'"),
        ('kind = "layer_norm"', 'knid = "layer_norm"', r"\[norm\] of .* unknown key 'knid'; known are kind, eps, "),
        ("base = ", "theta = ", r"\[rotary\] of .* unknown key 'theta'; known are pairing, .*base"),
        ("factor = 2.0", "factr = 2.0", r"\[rotary\], \[scaling\] of .* unknown key 'factr'; known are rope_type, "),
        ("10000.0", '{ config = "base" }', r"base of \[rotary\] of .* should be of type number, got"),
        ('K = "(head', 'W_K = "(head', r"\[layout\] of .* unknown key 'W_K'; known are Q, K, V, O, "),
        ('K = "l', 'W_K = "l', r"\[tensors\] of .* unknown key 'W_K'; known are Q, K, V, O, "),
    ],
)
def test_a_mapping_file_with_an_unknown_key_is_refused(tmp_path: Path, old, new, message):
    path = tmp_path / "map.toml"
    path.write_text(MAPPING)
    read_mapping(path)
    assert old in MAPPING
    path.write_text(MAPPING.replace(old, new))
    with pytest.raises(CallError, match=rf"the mapping {re.escape(str(path))}|{message}") as caught:
        read_mapping(path)
    assert re.search(message, str(caught.value))
    assert str(path) in str(caught.value)
