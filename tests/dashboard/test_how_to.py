"""The examples of docs/how-to/dashboard.md, taken from the page, and its pictures."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tenure.dashboard import users_from_file
from tests.dashboard.client import ask
from tests.dashboard.conftest import three

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "dashboard.md").read_text()
FASTAPI, DJANGO = re.findall(r"```py(?:thon)?\n(.*?)```", PAGE, re.DOTALL)
INSTALL, USERS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)

SETTINGS = """
import os
SECRET_KEY, USE_TZ, ROOT_URLCONF = "not one", True, "project.urls"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DJANGO_DATABASE"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
AFTER_DJANGO = """
from django.core.management import call_command
from django.contrib.auth import get_user_model, login
from django.contrib.sessions.backends.db import SessionStore
from django.http import HttpRequest
from tests.dashboard.client import ask

call_command("migrate", verbosity=0)

def signs_in(user):
    request = HttpRequest()
    request.session = SessionStore()
    login(request, user, "django.contrib.auth.backends.ModelBackend")
    request.session.save()
    return f"sessionid={request.session.session_key}"

create = get_user_model().objects.create_user
vera, olga = create("vera", is_staff=True), create("olga", is_staff=True, is_superuser=True)
cookie = signs_in(vera)
seen = ask(application, "/tenure/", cookie=cookie)
assert (seen.status, "scheduler" in seen.text, "<b>vera</b>" in seen.text) == (200, True, True), seen.text
assert "only look" in seen.text
assert "look and operate" in ask(application, "/tenure/", cookie=signs_in(olga)).text
assert ask(application, "/tenure/", cookie=signs_in(create("customer"))).status == 403
vera.set_password("changed"); vera.save()
assert ask(application, "/tenure/", cookie=cookie).status == 403, "the session is one of before the change"
olga_s = signs_in(olga); olga.is_active = False; olga.save()
assert ask(application, "/tenure/", cookie=olga_s).status == 403
forged = SessionStore()
forged["_auth_user_id"] = str(vera.pk)
forged.create()
assert ask(application, "/tenure/", cookie=f"sessionid={forged.session_key}").status == 403
assert ask(application, "/tenure/", cookie="sessionid=wrong").status == 403
assert ask(application, "/tenure/").status == 403
"""


@pytest.mark.frameworks
def test_fastapi_mounts_it_and_says_who_may_see_it(sqlite_url, monkeypatch):
    monkeypatch.setenv("TENURE_URL", sqlite_url)
    with three(sqlite_url):
        names = {}
        exec(FASTAPI, names)
        app = names["app"]
        assert ask(app, "/tenure/").status == 403
        seen = ask(app, "/tenure/", x_user="vera", client=("192.0.2.7", 1), host="admin.example")
        assert (seen.status, "scheduler" in seen.text, "only look" in seen.text) == (200, True, True)
        assert "look and operate" in ask(app, "/tenure/role", x_user="olga", query={"name": "scheduler"}).text
        assert ask(app, "/tenure/api/status", x_user="vera").status == 200
        assert ask(app, "/tenure/static/style.css", x_user="vera").status == 200


@pytest.mark.frameworks
def test_django_passes_its_path_on(sqlite_url, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "settings.py").write_text(SETTINGS)
    (tmp_path / "project" / "urls.py").write_text("urlpatterns = []\n")
    environment = {
        "TENURE_URL": sqlite_url,
        "DJANGO_DATABASE": str(tmp_path / "django.db"),
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PATH": "/usr/bin:/bin",
    }
    with three(sqlite_url):
        program = [sys.executable, "-c", DJANGO + textwrap.dedent(AFTER_DJANGO)]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_file_of_users_is_made_as_the_page_says(tmp_path):
    make, serve = USERS.rsplit("tenure ui", 1)
    subprocess.run(["sh", "-e", "-c", make], cwd=tmp_path, check=True)
    assert serve.split() == ["--users-file", "users"]
    assert (tmp_path / "users").stat().st_mode & 0o077 == 0
    assert [(user.name, user.right) for user in users_from_file(tmp_path / "users")] == [("olga", "operate")]


def test_command_of_the_page_exists():
    from click.testing import CliRunner

    from tenure.cli import main

    assert INSTALL.splitlines()[1] == "tenure ui --open"
    shown = CliRunner().invoke(main, ["ui", "--help"]).output
    assert all(option in shown for option in ("--open", "--bind", "--users-file", "127.0.0.1:8377"))


def test_pictures_of_the_page_are_there():
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", PAGE):
        assert (ROOT / "docs" / "how-to" / picture).read_bytes().startswith(b"\x89PNG")
