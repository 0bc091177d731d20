"""The rules of the protocol: what is cited exists, and each rule names its code, its tests and its mutations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.verification.mutations.test_lock_mutations import LOCK_MUTATIONS
from tests.verification.mutations.test_mutations import MUTATIONS

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "explanation" / "protocol.md").read_text()
RULES = dict(re.findall(r"^## (R\d+b?) .*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
CITED = re.compile(r"\bR\d+b?\b(?![./\w])")


def test_every_rule_that_is_cited_exists():
    texts = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py"), REPOSITORY / "docs/design.md"]
    cited = {name for path in texts if path != Path(__file__) for name in CITED.findall(path.read_text())}
    assert {"R0", "R12", "R15"} <= cited <= RULES.keys()


def test_every_mutation_belongs_to_a_rule():
    named = {name for text in RULES.values() for name in re.findall(r'"([^"]+)"', text.partition("*Mutation")[2])}
    assert named >= {mutation.rule for mutation in (*MUTATIONS, *LOCK_MUTATIONS)}


@pytest.mark.parametrize("rule", RULES)
def test_rule_names_code_and_proof_that_exist(rule):
    code, _, proof = RULES[rule].partition("*Code*: ")[2].partition(". *")
    assert code
    assert proof.startswith(("Mutation", "Test"))
    for path in re.findall(r"`([\w/*]+\.py)`", code):
        assert list((REPOSITORY / "src" / "tenure").glob(path)), path
    for path in re.findall(r"`(tests/[\w/]+\.py)", proof):
        assert (REPOSITORY / path).is_file(), path
