"""An application of Django's and one of SQLAlchemy's that write invoices, with the fence and without it."""

from __future__ import annotations

import os
from typing import Any, Protocol

import tenure
from tests.support.django_database import database


class Application(Protocol):
    """Writes an invoice that carries the token of its writer's term, in a transaction of its own."""

    def forget(self, token: int) -> None:
        """Write as somebody does who forgot the fence."""

    def fence(self, term: tenure.Term) -> None:
        """Write in a transaction that the term fences."""


class DjangoApplication:
    def __init__(self, url: str) -> None:
        import django
        from django.conf import settings

        settings.configure(DATABASES={"default": database(url)}, USE_TZ=True)
        django.setup()
        from django.db import models

        class Invoice(models.Model):
            id = models.BigAutoField(primary_key=True)
            token = models.BigIntegerField()

            class Meta:
                app_label = "billing"
                db_table = "invoices"

            def __str__(self) -> str:
                return f"{self.id}"

        self.invoices = Invoice.objects

    def forget(self, token: int) -> None:
        self._whole(lambda: self.invoices.create(token=token))

    def fence(self, term: tenure.Term) -> None:
        from django.db import connection, transaction

        def write() -> None:
            with transaction.atomic():
                term.fence(connection)
                self.invoices.create(token=term.token)

        self._whole(write)

    def _whole(self, write: Any) -> None:
        """Do as Django does around a request: a connection that the server has closed is not used again."""
        from django.db import close_old_connections, connection

        try:
            write()
        finally:
            if connection.errors_occurred:
                close_old_connections()


class AlchemyApplication:
    def __init__(self, url: str) -> None:
        import sqlalchemy as sa
        from sqlalchemy import orm

        class Base(orm.DeclarativeBase):
            pass

        class Invoice(Base):
            __tablename__ = "invoices"
            id = sa.Column(sa.BigInteger, primary_key=True)
            token = sa.Column(sa.BigInteger)

        self.invoice = Invoice
        drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
        scheme, _, rest = url.partition(":")
        self.session = orm.sessionmaker(sa.create_engine(f"{drivers[scheme]}:{rest}"))

    def forget(self, token: int) -> None:
        with self.session.begin() as session:
            session.add(self.invoice(token=token))

    def fence(self, term: tenure.Term) -> None:
        with self.session.begin() as session:
            term.fence(session)
            session.add(self.invoice(token=term.token))


FRAMEWORKS = {"django": DjangoApplication, "sqlalchemy": AlchemyApplication}


def application(framework: str) -> Application:
    """Return the application, on the database in TENURE_URL."""
    return FRAMEWORKS[framework](os.environ["TENURE_URL"])
