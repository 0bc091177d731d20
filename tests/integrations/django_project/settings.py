"""The settings. The database is TENURE_URL, so that the tests can choose."""

import os
from urllib.parse import urlsplit

from tests.support.django_database import database

HERE = "tests.integrations.django_project"
URL = urlsplit(os.environ["TENURE_URL"])

DATABASES = {
    "default": {
        **database(os.environ["TENURE_URL"]),
        "TEST": {"NAME": f"{URL.path[1:]}.test" if URL.scheme == "sqlite" else None},
    }
}
INSTALLED_APPS = ["tenure.integrations.django", f"{HERE}.ledger"]
ROOT_URLCONF = f"{HERE}.urls"
WSGI_APPLICATION = f"{HERE}.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
DEBUG = True
SECRET_KEY = "not one"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "loggers": {"tenure": {"handlers": ["stderr"], "level": "INFO"}},
}
