"""The app registers its leader-only work."""

from django.apps import AppConfig

from tenure.integrations.django import leader_only


class LedgerConfig(AppConfig):
    name = "tests.integrations.django_project.ledger"

    def ready(self) -> None:
        from .jobs import tick

        leader_only("scheduler", tick)
