"""Programs that look for a broken promise, and the tests of these programs.

The docstring of each package says what it does, how to run it and how long that takes.
"""
