"""A simulated Windows: `sitecustomize.py` takes away what Windows lacks, `plugin.py` skips the tests that need it."""
