# Everything on a fresh machine: `make demo` shows Evener at work, `make test` proves it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests start hundreds of processes: compiled modules are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =
# Tests wait more than they compute. Neighbours share what a module made once, so that a worker takes many in a row.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
# Those on accelerators in main memory compute, each in several processes.
CORES ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')

# The device of tests that need one: two accelerators in main memory, but not in CI.
DEVICE = $(or $(EVENER_TEST_DEVICE),$(if $(CI),none,standin:0))

.PHONY: demo test test-slow test-gpu test-yolo test-integrations check coverage docs clean

# $(call install,EXTRAS,STAMP)
define install
$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Evener needs Python 3.11 or later: make PYTHON=python3.11")'
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
touch $(2)
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,torch$(comma)report,$@)

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,dev,$@)

comma := ,

demo: $(VENV)/.demo
	$(BIN)/evener demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not alone and not cuda"
	$(BIN)/python -m pytest -m "not slow and alone and not cuda"
	EVENER_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -n $(CORES) --dist worksteal -m "cuda and not slow"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not cuda" --timeout 600
	EVENER_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -m cuda --timeout 600

# On the first GPU; tests that want two are skipped beside one. EVENER_TEST_DEVICE=cpu: the same tests on the processor;
# EVENER_TEST_DEVICE=standin:0: on two accelerators in main memory.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m cuda --timeout 600

# Ultralytics is under the AGPL-3.0 and takes 450 MB: only work on evener.frontends.yolo needs it.
$(VENV)/.yolo: $(VENV)/.dev
	$(call install,dev$(comma)ultralytics,$@)

test-yolo: $(VENV)/.yolo
	$(BIN)/python -m pytest tests/frontends/yolo -m 'slow or not slow' --timeout 600

# Trainers and loggers of others, and the programs of tests/programs that need them: some hundred packages.
$(VENV)/.integrations: $(VENV)/.dev
	$(call install,dev$(comma)integrations,$@)

test-integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest tests/frontends/integrations tests/programs tests/examples/test_examples.py tests/report/test_loggers.py -m 'slow or not slow' --timeout 900

check: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

coverage: $(VENV)/.dev
	$(BIN)/python -m pytest --cov --cov-report= --timeout 300
	$(BIN)/python -m coverage report --skip-covered --sort=cover
	$(BIN)/python -m coverage html --quiet

$(VENV)/.docs: $(VENV)/.dev
	$(call install,dev$(comma)docs,$@)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) demo runs site htmlcov
