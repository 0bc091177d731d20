"""Torture: a real cluster, broken in every way of the catalogue, and checkers over the recorded history.

    make torture MINUTES=3                     as long as you say, and a little more
    make torture DATABASE=mariadb SEED=123     on another database; the plan of an earlier run

docs/proof.md says what each part does and proves. Its options are in ``__main__``. The ordinary run has the tests of
the checkers. Runs of half a minute, of a Tenure that was broken on purpose, are among the long tests.
"""
