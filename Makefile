# The one front door. Each target sets up what it needs (see scripts/bootstrap); a second run finds it done.
#
#   make test ARGS="tests/fence/test_fence.py -k savepoint"    ARGS goes to the program behind the target
#   make test WORKERS=0                                  in one process, for a debugger
#   make test ARGS="-m long"                             the tests that take long, which the others leave out
#   make test ARGS="-m harness"                          the tests of what the tests stand on: servers, networks, poolers
#   make test WORKERS=0 AGAIN=1                          what failed in the last run, one test at a time
#   make test COVERAGE=1                                 and print how much of the source ran in the tests' own processes
#   make test ARGS="-m frameworks"                       FastAPI, Django, APScheduler, Celery and the rest, with real servers
#   make test FACADE=async                               the tests of the heart again, over AsyncNode
#   make test WINDOWS=1                                  what can pass without fork, flock and the signals that Windows lacks
#   make test VERSIONS=all ARGS="-k wheel"               what ran on the system's PostgreSQL, on 16 and 18 of wheels
#   make explore DEPTH=20 ARGS="--world strict"          as far as 20 steps lead, in one of the small worlds
#   make torture MINUTES=30 TAKEOVER=strict              DATABASE=postgres, mariadb, sqlite or patroni; SEED= for a plan again
#   make torture DATABASE=patroni ARGS="--replication asynchronous --route haproxy"
#   make failovers COUNT=20 FAULT=machine ARGS="--replication asynchronous"
#   make upgrade OLD=2f62708 DATABASE=sqlite             from an earlier commit and back; on all databases unless you name one

PYTHON  ?= python3
WORKERS ?= 5
SEEDS   ?= 10000
MINUTES ?= 3
KILLS ?= 200
WRITES ?= 1000
COUNT ?= 20
FAULT ?= switchover
OLD ?= 2f62708
DATABASE ?= postgres
TAKEOVER ?= instant
PORT ?= 8000

export PYTHON FACADE VERSIONS
unexport PYTHONDONTWRITEBYTECODE  # the tests start thousands of processes: let none of them compile everything anew

# What the facades stand for: run over each of them.
HEART := api/test_election api/test_node cluster/test_cut cluster/test_deploy cluster/test_failover cluster/test_partition \
	cluster/test_pause cluster/test_restart cluster/test_start fence/test_fence
FILES := $(if $(filter async,$(FACADE)),$(HEART:%=tests/%.py))

# A simulated Windows (see tests/support/windows). Its tests must not be ended by SIGALRM.
PARTS_ON_WINDOWS := architecture unit testing api fence store schedule manual databases cli
ON_WINDOWS := $(if $(WINDOWS),PYTHONPATH=$(CURDIR)/tests/support/windows:$(CURDIR))
WINDOWS_OPTIONS := $(if $(WINDOWS),-p tests.support.windows.plugin -o timeout_method=thread \
	$(if $(findstring tests/,$(ARGS)),,$(PARTS_ON_WINDOWS:%=tests/%)))

# What another version of a server could do differently.
NEW_ON_OTHER_VERSIONS := (wheel and not (claims or cli or fuzz)) or (mariadb and (cli_run or fork or test_node or upgrade))

# On a machine with two cores, five workers may leave a test too little time for a lease of a second. So a test that
# fails beside others is run again alone, and has to pass then. The log shows both runs.
ALONE := WORKERS=0 AGAIN=1

# `make check` has run the tests that compute already, beside the torture.
ORDINARY := -m 'not computing and not long and not frameworks and not harness'
MARKED   := -m '(long or frameworks or harness) and not computing'

BIN   := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo screens unit test check computing simulate explore torture failovers kills forgotten upgrade bench lint format types wheel docs cli-reference site docs-serve clean system-packages

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## watch an election, a crash and a takeover
	$(BIN)/tenure demo $(ARGS)

screens: $(READY) ## make the pictures and the transcript of the documents, from a real run
	@scripts/system-packages chromium chromium-driver
	PYTHONPATH=. $(BIN)/python scripts/screens.py
	PYTHONPATH=. $(BIN)/python scripts/dashboard_screens.py

unit: $(READY) ## run the tests that need no server, in seconds
	$(BIN)/pytest -n 2 $(ARGS) tests/unit tests/architecture

test: system-packages $(READY) ## run the tests, on every database that this machine can start
	$(ON_WINDOWS) $(BIN)/pytest -n $(WORKERS) --dist loadgroup $(WINDOWS_OPTIONS) $(if $(COVERAGE),--cov --cov-report term:skip-covered) $(ARGS) \
		$(if $(AGAIN),--last-failed --last-failed-no-failures none) $(if $(findstring tests/,$(ARGS)),,$(FILES))

check: ## run everything that a change must pass
	$(MAKE) lint system-packages
	$(BIN)/python scripts/at_once.py "$(MAKE) torture MINUTES=3" "nice -n 19 $(MAKE) computing"
	$(MAKE) test ARGS="$(ORDINARY)" || $(MAKE) test $(ALONE) ARGS="$(ORDINARY)"
	$(MAKE) test ARGS="$(MARKED)" || $(MAKE) test $(ALONE) ARGS="$(MARKED)"
	$(MAKE) test FACADE=async COVERAGE=1 || $(MAKE) test $(ALONE) FACADE=async
	$(MAKE) test VERSIONS=all ARGS="-k '$(NEW_ON_OTHER_VERSIONS)'" || \
		$(MAKE) test $(ALONE) VERSIONS=all ARGS="-k '$(NEW_ON_OTHER_VERSIONS)'"
	$(MAKE) demo

# The torture mostly waits. This has what it leaves of the processors.
# The website without `make cli-reference`: a test is to find that docs/cli.md is out of date.
computing: ## check the types, the wheel and the website, and run every test that computes rather than waits
	$(MAKE) types
	$(MAKE) wheel
	$(MAKE) site
	$(MAKE) test WORKERS=2 ARGS="--dist load -m computing"

simulate: $(READY) ## run SEEDS simulated histories with faults, or the one of SEED again
	$(BIN)/python -m tests.verification.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

explore: $(READY) ## look through every state of small worlds, to the end or for DEPTH steps; show what each rule prevents
	$(BIN)/python -m tests.verification.exploration $(if $(DEPTH),--depth $(DEPTH)) $(ARGS)

torture: system-packages $(READY) ## break a real cluster for MINUTES and check what it did
	$(BIN)/python -m tests.verification.torture --minutes $(MINUTES) --database $(DATABASE) --takeover $(TAKEOVER) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

failovers: system-packages $(READY) ## have a Patroni cluster fail over COUNT times, and measure the time without a leader
	$(BIN)/python -m tests.verification.failovers --count $(COUNT) --fault $(FAULT) $(ARGS)

kills: system-packages $(READY) ## kill the leader of a schedule KILLS times around due times, and account for each
	$(BIN)/python -m tests.verification.schedule --kills $(KILLS) --database $(DATABASE) $(ARGS)

forgotten: system-packages $(READY) ## freeze leaders whose author forgot the fence, until WRITES stale writes met a guarded table
	$(BIN)/python -m tests.verification.guards --writes $(WRITES) --database $(DATABASE) $(ARGS)

upgrade: DATABASE = all
upgrade: system-packages $(READY) ## replace nodes of the commit OLD by this one's, go back, and check what all of them did
	$(BIN)/python -m tests.verification.upgrade --old $(OLD) --database $(DATABASE) $(ARGS)

bench: $(READY) ## measure; with PEERS=1 beside what people would use instead, which takes about an hour
	$(if $(PEERS),@scripts/system-packages postgresql mariadb-server-core pgbouncer redis-server zookeeper etcd-server etcd-client)
	$(BIN)/python benchmarks/$(if $(PEERS),beside,run).py $(ARGS)

lint: $(READY) ## check style and form
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## mend what lint can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## check the types, also those of the examples and of the public interface
	$(BIN)/mypy
	$(BIN)/pyright

wheel: $(READY) ## build the wheel, install it into an empty environment, and elect a leader there
	scripts/wheel-check

docs: cli-reference site ## write docs/cli.md, and build the website into build/site

cli-reference: $(READY) ## write docs/cli.md from the commands' own help
	$(BIN)/python scripts/cli-reference

site: $(READY) ## build the website into build/site; a warning, a broken link or a foreign request is an error
	PYTHONPATH=. $(BIN)/python -m scripts.website

docs-serve: docs ## show the website on loopback, at PORT
	PYTHONPATH=. $(BIN)/python -m scripts.website --serve $(PORT)

clean: ## remove everything that make has made
	rm -rf .venv .tools build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PostgreSQL, MariaDB, a pooler, `ip` for networks that can be cut, a clock for servers, Prometheus's `promtool`, what a
# Patroni cluster needs, a reverse proxy for the dashboard, a browser, and terminals.
system-packages: ## install the servers that the tests start, where they are missing (on Debian, as root)
	@scripts/system-packages postgresql mariadb-server-core pgbouncer iproute2 faketime prometheus etcd-server haproxy \
		nginx-light chromium chromium-driver tmux

$(READY): pyproject.toml uv.lock scripts/bootstrap
	@scripts/bootstrap
	@touch $@
