# Python 3.11 to 3.13; another one: make PYTHON=python3.12 test
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
SOURCES := $(shell find histopipe -type f -not -path '*/__pycache__/*') pyproject.toml

.PHONY: help demo test check format docs lock image-check clean

help: ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# Exact versions, each file checked by its hash; then the package itself, installed as a user would have it.
$(VENV)/.dependencies: requirements/dev.lock
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	touch $@

demo: $(VENV)/.installed ## make slides, tile them, train, predict; ends with the held-out AUC and reports
	rm -rf $(DEMO)
	$(BIN)/histopipe demo --out $(DEMO)

test: $(VENV)/.installed ## the tests, against the installed package
	$(BIN)/python -P -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed ## format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(VENV)/.dependencies ## write every file in the one format
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

docs: $(VENV)/.installed ## write docs/settings.md from the declared settings
	$(BIN)/python -P tools/settings_table.py

image-check: ## build the container images without Docker, and use them: root, 10 minutes, 30 GB of disk
	docker/check

# pip-tools is not part of the lock that it writes. No address of an index may get into a lock.
lock: ## resolve the dependencies anew
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet pip-tools
	for set in "base" "train --extra train" "tune --extra train --extra tune" "dask --extra dask" "gpu --extra gpu --extra tune --extra onnx --extra dask" "cpu --extra cpu --extra tune --extra onnx --extra dask" "dev --extra train --extra tune --extra onnx --extra parquet --extra dask --extra dev --all-build-deps"; do \
	  set -- $$set; name=$$1; shift; \
	  $(VENV)-lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	    --no-header --no-annotate "$$@" -o requirements/$$name.lock pyproject.toml; \
	done

clean: ## remove what was made here
	rm -rf $(VENV) $(VENV)-lock build *.egg-info $(DEMO)
