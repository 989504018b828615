# A Python 3.11 to 3.13 with venv; the first that runs if it is empty. To choose one: make PYTHON=python3.12 test
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
VENV_WITH = python="$$(tools/find_python "$(1)")" && "$$python" -m venv
SOURCES := $(shell find histopipe -type f -not -path '*/__pycache__/*') pyproject.toml

.PHONY: help demo test test-all lint check format environments docs pages published release lock image-locks image-check container-check python-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# Exact versions, each file checked by its hash, and wheels only, as in the images. The package is installed as for a
# user, not in editable mode.
$(VENV)/.dependencies: requirements/dev.lock
	$(call VENV_WITH,$(PYTHON)) --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r requirements/dev.lock
	touch $@

$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	touch $@

demo: $(VENV)/.installed ## run the full pipeline on synthetic slides; ends with the test AUC and reports
	rm -rf $(DEMO)
	$(BIN)/histopipe demo --out $(DEMO)

# Three processes on two cores: many tests wait for a process that they started, and each process loads TensorFlow.
PYTEST := $(BIN)/python -P -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed ## run the tests against the installed package, except slow ones: 20 minutes on 2 cores
	$(PYTEST) -m "not slow" --hypothesis-profile few

test-all: test ## run the slow tests, too, and the property tests with more examples
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile many

lint: $(VENV)/.installed ## check format, lint, words, names and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -P tools/check_words.py
	$(BIN)/python -P tools/check_names.py
	$(BIN)/mypy

check: lint test ## check everything and run the tests

format: $(VENV)/.dependencies ## format all Python files
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

$(VENV)-docs/.dependencies: requirements/docs.lock
	$(call VENV_WITH,$(PYTHON)) --clear $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.lock
	touch $@

$(VENV)-docs/.installed: $(VENV)-docs/.dependencies $(SOURCES)
	rm -rf build
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	touch $@

environments: $(VENV)/.dependencies $(VENV)-docs/.dependencies

docs: $(VENV)-docs/.installed ## build the documentation into site/, and write the settings page
	$(VENV)-docs/bin/python -P tools/settings_table.py
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet

pages: $(VENV)/.installed ## run the commands of README and tutorials, compare their output, and run the notebooks
	$(BIN)/python -P tools/check_pages.py --commands README.md
	$(BIN)/python -P tools/check_pages.py docs/tutorial.md docs/tutorial-python.md
	$(BIN)/python -P tools/check_pages.py docs/how-to/public-archives.md
	$(BIN)/python -P tools/check_pages.py docs/how-to/slide-encoders.md
	$(BIN)/python -P tools/run_notebooks.py

published: $(VENV)/.installed ## run the recipes of published results whose data are present: hours
	$(BIN)/python tools/published/run.py

container-check: ## run all commands of README and tutorials in a new Debian: needs root, 30 minutes, 12 GB of disk
	tools/check_container pages

python-check: ## run demo and tests in new Debians with Python 3.11, 3.13 and 3.9 only: needs root, an hour, 12 GB of disk
	tools/check_container pythons

release: $(VENV)/.dependencies ## build wheel and sdist into dist/, and check them in new environments
	$(BIN)/python -P tools/release.py

# With the newest pip, because older ones ignore --only-binary when they list versions.
image-locks: ## check that all libraries of the container images have wheels
	$(call VENV_WITH,$(PYTHON)) $(VENV)-pip
	$(VENV)-pip/bin/pip install --quiet --upgrade pip
	$(VENV)-pip/bin/python -P tools/check_image_locks.py

image-check: ## build and check the container images without Docker: needs root, 10 minutes, 30 GB of disk
	docker/check

# pip-tools is not part of the lock that it writes. Python 3.11 needs some libraries that newer ones do not, so it resolves.
# Locks contain no addresses of package indexes.
lock: ## resolve all dependencies again
	$(call VENV_WITH,$(or $(PYTHON),python3.11)) $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet pip-tools
	for set in "base" "train --extra train" "tune --extra train --extra tune" "dask --extra dask" "gpu --extra gpu --extra tune --extra onnx --extra h5ad --extra mlflow --extra dask --extra view --extra remote --extra docx --extra xlsx" "cpu --extra cpu --extra tune --extra onnx --extra h5ad --extra mlflow --extra dask --extra view --extra remote --extra docx --extra xlsx" "docs --extra docs --all-build-deps" "dev --extra train --extra tune --extra onnx --extra h5ad --extra mlflow --extra parquet --extra dask --extra view --extra remote --extra docx --extra xlsx --extra fastslide --extra dev --all-build-deps"; do \
	  set -- $$set; name=$$1; shift; \
	  $(VENV)-lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras \
	    --pip-args "--only-binary :all:" \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	    --no-header --no-annotate "$$@" -o requirements/$$name.lock pyproject.toml; \
	done
	sed -i 's/^ecos==[^ ]*/& ; python_version < "3.13"/' requirements/dev.lock # as scikit-survival, which needs it

clean: ## remove environments, builds and the demo
	rm -rf $(VENV) $(VENV)-docs $(VENV)-lock $(VENV)-pip build dist site *.egg-info $(DEMO)
