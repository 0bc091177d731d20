"""The upgrade from an earlier release: real nodes of both, replaced one after the other, killed, frozen, and back.

    make upgrade OLD=2f62708                   on PostgreSQL, MariaDB and SQLite; a quarter of an hour
    make upgrade DATABASE=sqlite ARGS="--rounds 3 --takeover strict"

``trial`` says what is done, ``judge`` what is checked. docs/how-to/upgrade.md is what it holds the releases to. The
ordinary run has the tests of the checkers.
"""
