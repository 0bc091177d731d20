"""Torture: a real cluster, broken in every way of the catalogue, and checkers over the recorded history.

`make torture` runs it (tests/verification/torture/__main__.py); docs/proof.md says what each part does and proves.
"""
