"""The recipes for Django of docs/how-to/guarded-tables.md, taken from the page: a migration, and a runner of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.fence.test_guard_recipes import REFUSED, blocks, guards
from tests.integrations.cluster import ROOT

SETTINGS = """
import os
from urllib.parse import urlsplit

place = urlsplit(os.environ["TENURE_URL"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place.path[1:],
        "USER": place.username,
        "HOST": place.hostname,
        "PORT": place.port,
    }
}
INSTALLED_APPS = ["tenure.integrations.django", "billing"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "not one"
TEST_RUNNER = os.environ.get("RUNNER", "django.test.runner.DiscoverRunner")
"""
MODELS = """
from django.db import models


class Invoice(models.Model):
    number = models.IntegerField()
"""
CASES = """
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

import tenure
from billing.models import Invoice
from tenure.integrations.django import node_arguments


class Led:
    def test_fenced(self):
        with tenure.Node(**node_arguments()) as node, node.lead("billing") as term, transaction.atomic():
            term.fence(connection)
            Invoice.objects.create(number=1)

    def test_plain(self):
        Invoice.objects.create(number=1)


class InATestCase(Led, TestCase):
    pass


class InATransactionTestCase(Led, TransactionTestCase):
    pass
"""


def test_migration_of_django_guards_and_its_runner_removes_the_guard_for_tests(postgres_url, tmp_path):
    django_page = (ROOT / "docs" / "how-to" / "django.md").read_text()
    tables = re.search(r"^```py\n# billing/migrations/0002_tenure.py\n(.*?)^```", django_page, re.DOTALL | re.MULTILINE)
    assert tables is not None
    files = {"settings.py": SETTINGS, "billing/__init__.py": "", "billing/models.py": MODELS, "billing/tests.py": CASES}
    files["billing/migrations/__init__.py"] = ""
    files |= {name: text for name, text in blocks().items() if name.startswith("billing/")}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def django(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        told = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "DJANGO_SETTINGS_MODULE": "settings"}
        told |= {"TENURE_URL": postgres_url, **environment}
        command = [sys.executable, "-m", "django", *arguments]
        return subprocess.run(command, env=told, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    guard = (tmp_path / "billing/migrations/0003_guard.py").rename(tmp_path / "later")
    assert django("makemigrations", "billing").returncode == 0
    (tmp_path / "billing/migrations/0002_tenure.py").write_text(tables[1])
    guard.rename(tmp_path / "billing/migrations/0003_guard.py")
    done = django("migrate")
    assert done.returncode == 0, done.stderr
    assert guards(postgres_url) == [("public.billing_invoice", "default", "billing")]
    assert REFUSED in django("flush", "--noinput", "--traceback").stderr

    done = django("test")
    assert done.returncode == 1
    assert f"TRUNCATE on public.billing_invoice {REFUSED}" in done.stderr
    assert f"INSERT on public.billing_invoice {REFUSED}" in done.stderr
    done = django("test", RUNNER="billing.runner.UnguardedRunner")
    assert done.returncode == 0, done.stderr
    assert "Ran 4 tests" in done.stderr

    assert guards(postgres_url) == [("public.billing_invoice", "default", "billing")], "of the application's database"
    done = django("migrate", "billing", "0002")
    assert done.returncode == 0, done.stderr
    assert guards(postgres_url) == []
