"""The rules of the protocol: what is cited exists, and each rule leads to its code, its tests and its mutations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.verification.mutations.test_lock_mutations import LOCK_MUTATIONS
from tests.verification.mutations.test_mutations import MUTATIONS

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "explanation" / "protocol.md"
RULES = dict(re.findall(r"^## (R\d+b?) .*?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))
CITED = re.compile(r"\bR\d+b?\b(?![./\w])")
CITING = ("src/**/*.py", "tests/**/*.py", "docs/**/*.md", "tests/**/*.md", "benchmarks/*.md", "*.md")
MUTATED = {"test_mutations.py": MUTATIONS, "test_lock_mutations.py": LOCK_MUTATIONS}
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
LABEL = re.compile(r"^\*(?:Code|Test|\[Mutations?\]\([^)]+\))\*: ", re.MULTILINE)


def labelled(rule: str) -> dict[str, str]:
    """What a rule says after each label, by the first letter of the label."""
    text = RULES[rule]
    return {label[0].strip("*[")[0]: text[label.start() :].split("\n", 1)[0] for label in LABEL.finditer(text)}


def links(text: str) -> list[tuple[str, Path]]:
    """Return the words of each link, and the file to which it leads."""
    return [(words, (PAGE.parent / path).resolve()) for words, path in LINK.findall(text)]


def test_every_rule_that_is_cited_exists():
    texts = {path for pattern in CITING for path in REPOSITORY.glob(pattern)} - {Path(__file__)}
    cited = {name: path for path in texts for name in CITED.findall(path.read_text())}
    assert {"R0", "R12", "R15"} <= cited.keys()
    assert {name: path for name, path in cited.items() if name not in RULES} == {}


def test_every_mutation_belongs_to_a_rule():
    named = {name for rule in RULES for name in re.findall(r'"([^"]+)"', labelled(rule).get("M", ""))}
    assert named == {mutation.rule for mutations in MUTATED.values() for mutation in mutations}


@pytest.mark.parametrize("rule", RULES)
def test_rule_leads_to_code_and_proof_that_exist(rule):
    said = labelled(rule)
    assert "C" in said
    assert "M" in said or "T" in said
    for text in said.values():
        assert links(text)
        assert ".py" not in LINK.sub("", text), "a file without a link"
    for words, path in links(said["C"]):
        assert path == REPOSITORY / "src" / "tenure" / words.strip("`")
        assert path.is_file(), path
    for words, path in links(said.get("M", "") + said.get("T", "")):
        name, _, test = words.strip("`").partition("::")
        assert path.is_relative_to(REPOSITORY / "tests"), path
        assert path.is_file(), path
        assert name.startswith("Mutation") or path.as_posix().endswith(name), words
        assert not test or f"def {test}(" in path.read_text(), words


@pytest.mark.parametrize("rule", [rule for rule in RULES if "M" in labelled(rule)])
def test_rule_names_its_mutations_beside_the_file_that_has_them(rule):
    """A link stands before the mutations of its file."""
    _, *parts = LINK.split(labelled(rule)["M"])
    for path, text in zip(parts[1::3], parts[2::3], strict=True):
        there = {mutation.rule for mutation in MUTATED.get(Path(path).name, ())}
        assert set(re.findall(r'"([^"]+)"', text)) <= there
