"""A small Django project: an app with a model, leader-only services, commands, and its own tests."""
