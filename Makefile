# Every target installs what it needs into .venv. A new machine needs Python 3.11 or newer, and Java 17
# for Spark and a real ZooKeeper.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Let Python keep compiled modules, even if the environment forbids it: tests and the demo start hundreds
# of processes, and each process would compile the whole tree.
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

# Before a commit: format, lints, types, unit and conformance tests. Takes less than 3 minutes on two cores.
check: lint
	$(PYTEST) -m 'not night' tests/unit tests/conformance tests/test_*.py

# All tests except the long tests of `make night`. Takes 12 minutes on two cores of a machine that adds
# ten million numbers in Python in 0.84 s; 17 minutes, before four tests moved to `make night`, at 1.1 s.
test: setup
	$(PYTEST) -m 'not night' --durations=20

# The long tests: more histories, larger cases. Takes more than 10 minutes.
night: setup
	$(PYTEST) -m night --durations=20

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=tests $(BIN)/mypy -p magnetar -p benchmarks -p fakes -p checkers -p chaos -p power -p world -p explorer -p histories -p mutants -p compose -p apache
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory protos
	git diff --exit-code --stat -- protos

# Simulate whole clusters in one process, in virtual time, for a range of seeds: the seed chooses the
# faults. A failure prints its events and the command that replays it. `make test` plays the first 120
# seeds, `make night` the next 180.
SIM_FIRST ?= 0
SIM_SEEDS ?= 300
sim: setup
	PYTHONPATH=tests $(BIN)/python -m world.run --first $(SIM_FIRST) --seeds $(SIM_SEEDS)

# Play random histories (joins, leaves, acknowledgements, returns, expiry, seeks) with the dispatchers of
# all subscription types, and compare the results with a simple model. HISTORIES=200000 takes 15 minutes
# on one core. `make test` plays 1,250 histories, and checks that they find each planted bug.
HISTORIES ?= 10000
histories: setup
	PYTHONPATH=tests $(BIN)/python -m histories.run --histories $(HISTORIES)

# Kill real processes under a workload. SEED=N repeats the run with seed N.
chaos: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(if $(SEED),--seed $(SEED))

# Stop the broker that owns the topic (SIGSTOP) until another broker serves the topic, then continue it,
# under a producer and a consumer. Prints the messages that were lost, out of order or stored twice, and
# each outage. ROUNDS=100 rounds take about 20 minutes. SEED=N repeats the run with seed N.
stops: ROUNDS = 100
stops: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.run --stops $(ROUNDS) $(if $(SEED),--seed $(SEED))

# Restart every broker and every bookie, one after the other, under Apache's client with deduplication
# and retention on, ROUNDS=10 times. Fails if a message is lost or stored twice.
ROUNDS ?= 10
rolling: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.rolling --rounds $(ROUNDS)

# Copy a topic with Spark's source and sink, without and with a shuffle, while Python workers, drivers,
# brokers and bookies are killed, KILLS=20 times. Fails if a message is not copied exactly once. SEED=N
# repeats the run with seed N.
KILLS ?= 20
spark-kills: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.spark_exactly_once --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# Run hostile programs (COMMANDS=100000) against a server, beside honest clients whose service is measured.
# Prints a report. SEED=N repeats the run with seed N. `make test` runs a short siege.
COMMANDS ?= 100000
siege: setup
	PYTHONPATH=tests $(BIN)/python -m siege.run --commands $(COMMANDS) $(if $(SEED),--seed $(SEED))

# Cut the power of a bookie's disk, and kill the bookie, under load: 50 times each. Needs root.
powercuts: setup
	PYTHONPATH=tests $(BIN)/python -m power.run $(if $(SEED),--seed $(SEED))

# Explore all interleavings of the ledger protocol: three entries, a writer and two recoverers that may
# change their ensembles, E/Qw/Qa 3/3/2 and 4/3/2, lost messages, a crash. Also print the shortest way to
# each planted bug. Equivalent interleavings are left out; smaller cases, explored in full, check that this
# loses no state. Takes 500 s of CPU in two processes of at most 120 MB each.
explore: setup
	PYTHONPATH=tests $(BIN)/python -m explorer.run

# Plant bugs, one after the other, and print which oracle finds each bug, and within how many seeds. Fails
# unless all bugs are found. ONLY=TEXT plants only the bugs whose names contain TEXT.
mutants: setup
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(if $(ONLY),--only "$(ONLY)")

# Measure Magnetar and a minimal data path in the same run. Prints the figures, and asserts nothing.
bench: setup
	$(BIN)/python -m benchmarks.run

# Measure this tree and an older revision (OLD=REVISION) in TURNS=5 turns, and print the changes.
TURNS ?= 5
bench-versus: setup
	$(BIN)/python -m benchmarks.versus $(OLD) --turns $(TURNS)

# Build the tutorial and the API reference as a site, in build/site. Fails on a broken link or name.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' --config-settings editable_mode=compat
	$(BIN)/python -m mkdocs build --quiet

# Write the versions that the image installs (deploy/constraints.txt), resolved in a new environment.
constraints:
	rm -rf $(VENV).constraints && $(PYTHON) -m venv $(VENV).constraints
	$(VENV).constraints/bin/pip install --quiet --disable-pip-version-check .
	{ sed -n '/^#/p' deploy/constraints.txt; $(VENV).constraints/bin/pip freeze --exclude magnetar; } >$(VENV).new
	mv $(VENV).new deploy/constraints.txt && rm -rf $(VENV).constraints build/lib build/bdist.*

# Build the image and run the compose file in a Docker engine, with kills under load. Needs an engine
# and Docker Compose v2; without them every test is skipped with its reason. Takes about 5 minutes.
compose: setup
	$(BIN)/python -m pytest tests/compose/suite.py

# Generated modules are committed, so that `pip install` needs no compiler. `make lint` generates them
# again, and fails if they differ.
# gRPC stubs are not generated: the code serves and calls every method with its own serializers.
protos: setup
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=quiet:. magnetar/protos/*.proto

# The jars of a real Apache Pulsar. Maven fetches them once (240 MB, outside of the tree).
PULSAR_JARS ?= $(HOME)/.cache/magnetar/apache-pulsar
PULSAR_POM := benchmarks/peers/pulsar/pom.xml

$(PULSAR_JARS)/.fetched: $(PULSAR_POM)
	@command -v mvn >/dev/null || { echo "Maven is missing: apt-get install maven"; exit 1; }
	rm -rf $(PULSAR_JARS)
	mvn -q -B -f $(PULSAR_POM) dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(PULSAR_JARS)
	@touch $@

# Test Magnetar's client against a real Apache Pulsar. Needs Java 17 and Maven. Takes about 2 minutes, and
# 2 more the first time.
pulsar: setup $(PULSAR_JARS)/.fetched
	MAGNETAR_PULSAR_JARS=$(PULSAR_JARS) $(BIN)/python -m pytest tests/apache/suite.py

# Measure Magnetar and Apache Pulsar under the same loads, in TURNS=5 turns of 10 to 11 minutes each. Needs
# Java 17 and Maven. ONLY=TEXT plays only the rows whose names contain TEXT. TAKEN=0.5 takes half of each CPU
# away, as on a slower machine.
TAKEN ?= 0
bench-pulsar: setup $(PULSAR_JARS)/.fetched
	MAGNETAR_PULSAR_JARS=$(PULSAR_JARS) $(BIN)/python -m benchmarks.peers.pulsar --turns $(TURNS) --only "$(ONLY)" --taken $(TAKEN)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
