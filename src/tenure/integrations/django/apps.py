"""The app, which does nothing but check its settings."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks

from tenure.errors import ConfigError
from tenure.integrations.django.conf import node_arguments
from tenure.node import Node


class TenureConfig(AppConfig):  # type: ignore[misc]
    """Tenure, as Django knows it."""

    name = "tenure.integrations.django"
    label = "tenure"
    verbose_name = "Tenure"

    def ready(self) -> None:
        """Have ``manage.py check`` look at the settings. Nobody is elected by this."""
        checks.register(check_settings)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Say why no node could be made; a warning, since everything else works."""
    try:
        Node(**node_arguments())
    except ConfigError as error:
        return [checks.Warning(f"Tenure cannot elect anybody: {error}", id="tenure.W001")]
    return []
