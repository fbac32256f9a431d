.DEFAULT_GOAL := help
VENV ?= .venv
LOWEST ?= .venv-lowest
PYTHON ?= python3
BIN := $(VENV)/bin

COMMON := runs/transformers

.PHONY: help demo app docs test test-app test-common test-lowest audit check format clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/conjoin: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(BIN)/conjoin ## Train, index, search and evaluate on the embedded sample; writes runs/demo/report.html
	$(BIN)/conjoin demo

runs/demo/gallery: | $(BIN)/conjoin
	$(BIN)/conjoin demo

app: $(BIN)/conjoin runs/demo/gallery ## Search the demo's collection in the browser; makes the demo first if needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[app]"
	$(BIN)/conjoin app runs/demo/gallery

docs: $(BIN)/conjoin ## Build the documentation site, strictly and offline; writes runs/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: $(BIN)/conjoin ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-app: ## Run the tests of the search app, with a browser if there is one, in an environment of their own
	$(PYTHON) -m venv $(VENV)-app
	$(VENV)-app/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)-app/bin/python -m pip install --quiet --disable-pip-version-check -e ".[app,sample,train]" httpx playwright pytest
	$(VENV)-app/bin/python -m pytest tests/serving tests/cli/test_serving_commands.py

test-common: $(BIN)/conjoin ## Run transformers' own model tests, from its source distribution, on the models here
	version=$$($(BIN)/python -c "import transformers; print(transformers.__version__)") && \
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary transformers \
		--dest $(COMMON) transformers==$$version && \
	tar -xzf $(COMMON)/transformers-$$version.tar.gz -C $(COMMON) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(COMMON)/extra parameterized && \
	TRANSFORMERS_SDIST=$(COMMON)/transformers-$$version PYTHONPATH=$(COMMON)/extra:$$PYTHONPATH \
		$(BIN)/python -m pytest -n 2 -o addopts= -W ignore tests/models/test_transformers_common.py

test-lowest: ## Run the tests with the lowest versions that pyproject.toml allows, in an environment of their own
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e ".[dev]" torchvision
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal

audit: $(BIN)/conjoin ## Look the pinned versions up among the known vulnerabilities; needs the advisories of PyPI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip_audit --strict --no-deps --disable-pip -r constraints.txt

check: $(BIN)/conjoin ## Lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BIN)/conjoin ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what the demo and the tests wrote
	rm -rf runs .mypy_cache .pytest_cache .ruff_cache
