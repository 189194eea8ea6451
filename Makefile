# The one runner. Every target sets itself up: a fresh machine needs Python 3.11+ and, for Spark and a
# real ZooKeeper, Java 17. Everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint chaos bench protos clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "magnetar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[spark,demo,test,dev]' --config-settings editable_mode=compat
	@touch $@

# A year of flights through a standalone server that is killed half-way, checked by Spark.
demo: setup
	$(BIN)/python -m magnetar.demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p magnetar
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory protos
	git diff --exit-code --stat -- protos

# Real processes that are killed under a workload; SEED=N does again what was done with N.
chaos: setup
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(if $(SEED),--seed $(SEED))

# Figures beside those of a bare data path in the same run; nothing is asserted.
bench: setup
	$(BIN)/python -m benchmarks.run

# Generated modules are committed, so that `pip install` needs no compiler; lint compares them.
# Stubs are not generated: every method is served and called with serializers of our own.
protos: setup
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=quiet:. magnetar/protos/*.proto

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
