"""Drivers: how Tenure reaches PostgreSQL, MariaDB and SQLite.

Each database has a folder with the same modules:

- ``backend.py``: a ``Backend`` (see ``databases.backend``), which opens what each lane of a node needs;
  ``backend_for()`` picks it by the URL;
- ``connect.py``: a connector, which opens connections within time limits, with everything set that a node relies on;
- ``servers.py`` (not SQLite): which servers are refused, by what they say of themselves;
- ``session.py``: a ``Session`` (see ``store.session``), which runs steps in transactions, and turns the driver's errors
  into ``Gone`` (the outcome is unknown) and ``Failed`` (nothing was done);
- ``sentinel.py``: a ``Sentinel`` (see ``store.session``), a lock that ends with the process that holds it;
- ``schema.py``: a ``Schema`` (see ``store.migrations``), for what is special about its tables;
- ``doctor.py``: the checks of ``tenure doctor``.

Elsewhere are its words (``store.dialects``, so that every statement that decides who leads is written once), its URL
(``settings``), and the fence of its drivers (``fence``).
"""
