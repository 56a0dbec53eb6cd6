# `make demo` and `make test` set up what they need; Python 3.11 and make are enough.
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
# Installed again only when the list of packages changes.
INSTALLED := .venv/.installed
INSTALLED_FOR_TESTS := .venv/.installed-for-tests

.PHONY: setup setup-tests browser test check demo clean
setup: $(INSTALLED)
setup-tests: $(INSTALLED_FOR_TESTS)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(PIP) --editable .
	touch $@

# The tools, and verl with Ray: what the tests need beside the product.
$(INSTALLED_FOR_TESTS): $(INSTALLED)
	$(PIP) --editable ".[dev,verl]"
	touch $@

check: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Plain DAPO and dual-LoRA on the same tasks, compared: under 10 minutes on two cores.
demo: setup
	$(BIN)/lfo demo

# The report's page is tested in a real one.
browser:
	scripts/install_browser.sh

# Each test file runs on one worker, so that what it sets up is set up once.
test: setup-tests check browser
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf .venv build
