"""``python -m tenure`` is ``tenure``."""

from tenure.cli import main

main(prog_name="tenure")
