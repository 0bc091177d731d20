"""A Flask application: every worker answers, and one of them runs the schedule. `pip install flask gunicorn` first.

TENURE_URL=postgresql://localhost/app gunicorn --chdir examples --workers 4 'flask_app:create_app()'
"""

import atexit

import flask

import tenure

schedule = tenure.Schedule()


@schedule.every("1 s")
def report(run: tenure.Run) -> None:
    print(f"report of {run.due.astimezone():%H:%M:%S}, under token {run.term.token}", flush=True)


def create_app() -> flask.Flask:
    node = tenure.Node()  # the database of TENURE_URL
    node.leader_only("scheduler", schedule)
    node.start()  # in each worker, after the fork
    atexit.register(node.close)  # stops the schedule, and hands over
    app, election = flask.Flask(__name__), node.election("scheduler")

    @app.get("/")  # on every worker
    def query() -> dict[str, str]:
        return {"answered by": node.name}

    @app.get("/leader")  # 200 if this worker leads, else 503
    def leader() -> tuple[dict[str, str | None], int]:
        known = election.leader()  # asks the database
        return {"node": node.name, "leader": known.name if known else None}, 200 if election.is_leader else 503

    return app
