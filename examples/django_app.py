"""A Django project in one file: every process serves, and one of them ticks. `pip install 'tenure[django]'` first.

python examples/django_app.py runserver 8000    # and on 8001, 8002; http://127.0.0.1:8000/ says whether it leads
gunicorn --pythonpath examples --workers 4 django_app    # the same under a real server
python examples/django_app.py tenure_status    # who leads; the ticks go into django_app.db
"""

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import JsonResponse
from django.urls import path

from tenure import Term
from tenure.integrations.django import get_node, leader_only, start

if not settings.configured:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "django_app.db"}
    apps = {"INSTALLED_APPS": ["tenure.integrations.django"], "WSGI_APPLICATION": "django_app.application"}
    settings.configure(DEBUG=True, DATABASES={"default": database}, ROOT_URLCONF="django_app", **apps)


def tick(term: Term) -> None:
    while not term.wait_lost(timeout=1):
        with transaction.atomic(), connection.cursor() as cursor:
            term.fence(connection)  # what follows commits only if this term is still the latest
            cursor.execute("create table if not exists ticks (at text default current_timestamp, token integer)")
            cursor.execute("insert into ticks (token) values (%s)", [term.token])


urlpatterns = [path("", lambda _: JsonResponse({"leads": get_node().election("ticker").is_leader}))]
if __name__ == "__main__":
    execute_from_command_line()
else:  # imported by a server, so this process serves
    leader_only("ticker", tick)
    application = get_wsgi_application()
    start()
