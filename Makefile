# A Python 3.11 to 3.13 with venv; the first that runs if it is empty. To choose one: make PYTHON=python3.12 test
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
VENV_WITH = python="$$(tools/find_python "$(1)")" && "$$python" -m venv
SOURCES := $(shell find histopipe -type f -not -path '*/__pycache__/*') pyproject.toml

.PHONY: help demo test nightly lint check format docs readme pages published release lock image-locks image-check container-check python-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# Exact versions, each file checked by its hash, and wheels only, as in the images. What the demo needs comes first; what
# the checks need is added to the same environment.
$(VENV)/.libraries: requirements/train.lock requirements/uv.lock
	$(call VENV_WITH,$(PYTHON)) --clear $(VENV)
	$(BIN)/python -P tools/install.py requirements/train.lock
	touch $@

$(VENV)/.dependencies: requirements/dev.lock $(VENV)/.libraries
	$(BIN)/python -P tools/install.py requirements/dev.lock
	touch $@

$(VENV)/.nightly: requirements/nightly.lock $(VENV)/.dependencies
	$(BIN)/python -P tools/install.py requirements/nightly.lock
	touch $@

# The package is installed as for a user, not in editable mode.
$(VENV)/.installed: $(VENV)/.libraries $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	touch $@

$(VENV)/.ready: $(VENV)/.installed $(VENV)/.dependencies
	touch $@

demo: $(VENV)/.installed ## run the full pipeline on synthetic slides; ends with the test AUC and reports
	rm -rf $(DEMO)
	$(BIN)/histopipe demo --out $(DEMO)

# Three processes on two cores: many tests wait for a process that they started, and each process loads TensorFlow.
PYTEST := $(BIN)/python -P -m pytest -n 3 --dist loadgroup

test: $(VENV)/.ready ## run the tests against the installed package: 8 minutes on 2 cores
	$(PYTEST) -m "not nightly" --hypothesis-profile few --budget

# TENTH=I, from 0 to 9, runs a tenth of each part.
TENTH ?=
nightly: $(VENV)/.ready $(VENV)/.nightly ## run what takes long: quality, kills, more examples, browsers, tutorials, notebooks
	$(PYTEST) -m "nightly or hypothesis" --hypothesis-profile many $(addprefix --tenth=,$(TENTH))
	$(BIN)/python -P tools/nightly_pages.py $(addprefix --tenth=,$(TENTH))

lint: $(VENV)/.ready ## check format, lint, words, names and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -P tools/check_words.py
	$(BIN)/python -P tools/check_names.py
	$(BIN)/mypy

check: lint test ## check everything and run the tests

format: $(VENV)/.dependencies ## format all Python files
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

$(VENV)-docs/.dependencies: requirements/docs.lock requirements/uv.lock
	$(call VENV_WITH,$(PYTHON)) --clear $(VENV)-docs
	$(VENV)-docs/bin/python -P tools/install.py requirements/docs.lock
	touch $@

$(VENV)-docs/.installed: $(VENV)-docs/.dependencies $(SOURCES)
	rm -rf build
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	touch $@

docs: $(VENV)-docs/.installed ## build the documentation into site/, and write the pages of settings, formats and commands
	$(VENV)-docs/bin/python -P tools/settings_table.py
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet

readme: $(VENV)/.ready ## run the commands of the README, and compare their output
	$(BIN)/python -P tools/check_pages.py --commands README.md

published: $(VENV)/.ready ## run the recipes of published results whose data are present: hours
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
# Locks contain no addresses of package indexes. The largest set comes first; the others have its versions.
lock: ## resolve all dependencies again
	$(call VENV_WITH,$(or $(PYTHON),python3.11)) $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet pip-tools
	dev="--extra train --extra tune --extra onnx --extra h5ad --extra mlflow --extra parquet --extra dask --extra view --extra xlsx --extra fastslide --extra dev"; \
	image="--extra tune --extra onnx --extra h5ad --extra mlflow --extra dask --extra view --extra remote --extra xlsx"; \
	: > requirements/constraints.txt; \
	for set in "nightly $$dev --extra nightly --extra remote --extra umap --all-build-deps" "dev $$dev --all-build-deps" "base" "train --extra train" "tune --extra train --extra tune" "dask --extra dask" "gpu --extra gpu $$image" "cpu --extra cpu $$image" "docs --extra docs --all-build-deps"; do \
	  set -- $$set; name=$$1; shift; \
	  $(VENV)-lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras \
	    --pip-args "--only-binary :all:" --constraint requirements/constraints.txt \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	    --no-header --no-annotate "$$@" -o requirements/$$name.lock pyproject.toml || exit; \
	  sed -n 's/^\([^ #]*==[^ ;]*\).*/\1/p' requirements/nightly.lock > requirements/constraints.txt; \
	done; rm requirements/constraints.txt
	echo uv | $(VENV)-lock/bin/pip-compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options --no-header --no-annotate -o requirements/uv.lock -
	sed -i 's/^ecos==[^ ]*/& ; python_version < "3.13"/' requirements/nightly.lock requirements/dev.lock # as scikit-survival, which needs it

clean: ## remove environments, builds and the demo
	rm -rf $(VENV) $(VENV)-docs $(VENV)-lock $(VENV)-pip build dist site *.egg-info $(DEMO)
