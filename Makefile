# Every target installs what it needs into .venv. A fresh machine needs Python 3.11+ and, for Spark
# and a real ZooKeeper, Java 17.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Python keeps compiled modules, also where the environment says no: tests and the demo start hundreds of
# processes, and each would compile the whole tree.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test night lint sim histories chaos stops rolling spark-kills siege powercuts explore mutants bench bench-versus bench-pulsar docs constraints compose pulsar protos clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "magnetar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[spark,demo,test,dev]' --config-settings editable_mode=compat
	@touch $@

# A year of flights through a standalone server that is killed half-way, checked by Spark.
demo: setup
	$(BIN)/python -m magnetar.demo

# WORKERS: the number of test processes. tests/conftest.py defines the groups and the order of tests.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# Before a commit: format, lints, types, unit and conformance tests. Under 3 minutes on two cores.
check: lint
	$(PYTEST) -m 'not night' tests/unit tests/conformance tests/test_*.py

# All tests but the long ones of `make night`. Under 12 minutes on two cores.
test: setup
	$(PYTEST) -m 'not night' --durations=20

# The long tests: more histories, larger cases. Ten minutes more.
night: setup
	$(PYTEST) -m night --durations=20

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=tests $(BIN)/mypy -p magnetar -p benchmarks -p fakes -p checkers -p chaos -p power -p world -p explorer -p histories -p mutants -p compose -p apache
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory protos
	git diff --exit-code --stat -- protos

# Whole clusters in one process, in virtual time, with faults chosen by the seed; a range of seeds. A
# failure prints its events and the command that replays it. `make test` plays the first 300 seeds.
SIM_FIRST ?= 0
SIM_SEEDS ?= 300
sim: setup
	PYTHONPATH=tests $(BIN)/python -m world.run --first $(SIM_FIRST) --seeds $(SIM_SEEDS)

# Random histories of the dispatchers of all subscription types, compared with a simple model: joins,
# leaves, acknowledgements, returns, expiry, seeks. HISTORIES=200000 takes 15 minutes of one core;
# `make test` plays 1,250, and checks that they find each planted bug.
HISTORIES ?= 10000
histories: setup
	PYTHONPATH=tests $(BIN)/python -m histories.run --histories $(HISTORIES)

# Real processes that are killed under a workload; SEED=N repeats the run with seed N.
chaos: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(if $(SEED),--seed $(SEED))

# The broker that owns the topic is stopped (SIGSTOP) until another broker serves the topic, and continues;
# 100 times under a producer and a consumer. Prints what was lost, out of order or stored twice, and each
# outage. ROUNDS=100; SEED=N repeats the run with seed N. 100 rounds take about 20 minutes.
stops: ROUNDS = 100
stops: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.run --stops $(ROUNDS) $(if $(SEED),--seed $(SEED))

# Every broker and every bookie is restarted, one after the other, under Apache's client with
# deduplication and retention on: nothing is lost, nothing stored twice. ROUNDS=10.
ROUNDS ?= 10
rolling: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.rolling --rounds $(ROUNDS)

# Spark's source and sink copy a topic exactly once, without and with a shuffle, while Python workers,
# drivers, brokers and bookies are killed. KILLS=20; SEED=N does again what was done with N.
KILLS ?= 20
spark-kills: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.spark_exactly_once --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# Hostile programs against a server, beside honest clients whose service is measured; prints a report.
# COMMANDS=100000; SEED=N repeats the run with seed N. `make test` runs a short siege.
COMMANDS ?= 100000
siege: setup
	PYTHONPATH=tests $(BIN)/python -m siege.run --commands $(COMMANDS) $(if $(SEED),--seed $(SEED))

# The power of a bookie's disk is cut, and the bookie killed, under load: 50 times each. Needs root.
powercuts: setup
	PYTHONPATH=tests $(BIN)/python -m power.run $(if $(SEED),--seed $(SEED))

# All interleavings of the ledger protocol: three entries, a writer and two recoverers that may change
# their ensembles, 3/3/2 and 4/3/2, lost messages, a crash; and the shortest way to each planted bug.
# Equivalent interleavings are left out; smaller cases, explored in full, check that this loses no
# state. 500 s of CPU shared by two processes of at most 120 MB.
explore: setup
	PYTHONPATH=tests $(BIN)/python -m explorer.run

# Planted bugs, one after the other: which oracle finds each, and within how many seeds. Fails unless
# all are found. ONLY=TEXT plants only the bugs whose names contain TEXT.
mutants: setup
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(if $(ONLY),--only "$(ONLY)")

# Figures of Magnetar and of a minimal data path in the same run; nothing is asserted.
bench: setup
	$(BIN)/python -m benchmarks.run

# This tree and an older revision in turns: which figure changed. OLD=revision, TURNS=5.
TURNS ?= 5
bench-versus: setup
	$(BIN)/python -m benchmarks.versus $(OLD) --turns $(TURNS)

# The tutorial and the API reference as a site, in build/site. Fails on a broken link or name.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' --config-settings editable_mode=compat
	$(BIN)/python -m mkdocs build --quiet

# The versions that the image installs (deploy/constraints.txt), resolved in a fresh environment.
constraints:
	rm -rf $(VENV).constraints && $(PYTHON) -m venv $(VENV).constraints
	$(VENV).constraints/bin/pip install --quiet --disable-pip-version-check .
	{ sed -n '/^#/p' deploy/constraints.txt; $(VENV).constraints/bin/pip freeze --exclude magnetar; } >$(VENV).new
	mv $(VENV).new deploy/constraints.txt && rm -rf $(VENV).constraints build/lib build/bdist.*

# Build the image and run the compose file in a Docker engine, with kills under load. Needs an engine
# and Docker Compose v2; without them every test is skipped with its reason. Takes about 5 minutes.
compose: setup
	$(BIN)/python -m pytest tests/compose/suite.py

# Generated modules are committed, so that `pip install` needs no compiler; lint compares them.
# gRPC stubs are not generated: the code serves and calls every method with its own serializers.
protos: setup
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=quiet:. magnetar/protos/*.proto

# The jars of a real Apache Pulsar, which Maven fetches once (240 MB, outside of the tree).
PULSAR_JARS ?= $(HOME)/.cache/magnetar/apache-pulsar
PULSAR_POM := benchmarks/peers/pulsar/pom.xml

$(PULSAR_JARS)/.fetched: $(PULSAR_POM)
	@command -v mvn >/dev/null || { echo "Maven is missing: apt-get install maven"; exit 1; }
	rm -rf $(PULSAR_JARS)
	mvn -q -B -f $(PULSAR_POM) dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(PULSAR_JARS)
	@touch $@

# Our client against a real Apache Pulsar. Needs Java 17 and Maven. Takes about 2 minutes, the first
# time 2 more.
pulsar: setup $(PULSAR_JARS)/.fetched
	MAGNETAR_PULSAR_JARS=$(PULSAR_JARS) $(BIN)/python -m pytest tests/apache/suite.py

# Magnetar and Apache Pulsar under the same loads, in turns. Needs Java 17 and Maven. A turn takes 9
# minutes. ONLY=TEXT plays only the rows whose names contain TEXT.
bench-pulsar: setup $(PULSAR_JARS)/.fetched
	MAGNETAR_PULSAR_JARS=$(PULSAR_JARS) $(BIN)/python -m benchmarks.peers.pulsar --turns $(TURNS) --only "$(ONLY)"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
