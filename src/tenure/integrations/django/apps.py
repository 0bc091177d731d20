"""The Django app. It only checks its settings."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks

from tenure import ConfigError, Node
from tenure.integrations.django.conf import node_arguments


class TenureConfig(AppConfig):  # type: ignore[misc]
    """The app ``tenure``."""

    name = "tenure.integrations.django"
    label = "tenure"
    verbose_name = "Tenure"

    def ready(self) -> None:
        """Have ``manage.py check`` check the settings. This starts no election."""
        checks.register(check_settings)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Return a warning if no node can be created with these settings. Everything else in the project still works."""
    try:
        Node(**node_arguments())
    except ConfigError as error:
        return [checks.Warning(f"Tenure cannot elect a leader: {error}", id="tenure.W001")]
    return []
