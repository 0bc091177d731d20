"""Tenure in a Django project: ``"tenure.integrations.django"`` in INSTALLED_APPS.

    settings.py   TENURE = {"DATABASE": "default", "TTL": 10}      # both are the defaults
    apps.py       leader_only("scheduler", tick)                   # in ready(): what runs on the leader alone
    wsgi.py       start()                                          # this process serves, so its node may lead

Importing, migrating and testing start no election. A node is a candidate only in a process that called :func:`start`,
in a command with :func:`leader_command`, and under ``manage.py tenure_run``.
"""

from __future__ import annotations

from tenure.integrations import extra

with extra("django"):
    import django  # noqa: F401

from tenure.integrations.django.commands import leader_command
from tenure.integrations.django.conf import node_arguments
from tenure.integrations.django.process import everywhere, get_node, leader_only, start, stop

__all__ = ["everywhere", "get_node", "leader_command", "leader_only", "node_arguments", "start", "stop"]
