"""The application's connection: fences and claims inside a transaction that the application opened.

The database decides whether a term is the latest; this package sends the question and reports the answer. Three rules
hold for every driver:

1. The fence is part of the application's transaction. Without one (in autocommit mode) the fence would protect nothing,
   so it raises ConfigError. Nothing in this package opens a connection or commits.
2. After a refusal the transaction cannot commit, even if the application swallows the exception. On PostgreSQL the
   server raises an error, which aborts the transaction. SQLite and MariaDB raise none, so the adapter rolls back.
3. Only ``verdicts`` turns a driver's error into an error of Tenure, by its SQLSTATE. Every error that it does not know
   reaches the application as the driver raised it.

``fence`` has the statements for each database. ``adapter`` has the interface to a driver, and the table that finds the
adapter for a connection's class. ``drivers`` has one module per driver. ``job_runs`` claims runs of jobs after the
fence, with the same adapters.

A new driver needs one module in ``drivers`` and one row in ``adapter.DRIVERS``. The module has a subclass of
``Adapter`` for each class of connections, listed in ``KINDS``, and imports its driver only inside functions. If the
driver's errors have no SQLSTATE, extend ``verdicts.sqlstate``.
"""
