"""A page that shows who leads: roles and their terms, members, jobs, waits, and what the doctor finds.

    app.mount("/tenure", dashboard(url, access=who))    in FastAPI or Starlette
    tenure ui                                           alone, for this machine

``who(request)`` returns None, ``"view"`` or ``"operate"``, or a right and a name. Without it, and without users, the
dashboard answers only this machine, and permits no actions. It is never a member, and holds no lock, except for a
moment while the doctor tests locks.
"""

from __future__ import annotations

from tenure.integrations import extra

with extra("dashboard"):
    import jinja2  # noqa: F401 - to say in one line what is missing
    import starlette  # noqa: F401

from tenure.dashboard.access import Access, User, users_from_file
from tenure.dashboard.application import Dashboard, dashboard

__all__ = ["Access", "Dashboard", "User", "dashboard", "users_from_file"]
