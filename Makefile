# `make demo` and `make test` set up what they need; Python 3.11 and make are enough.
PYTHON ?= python3.11
BIN := .venv/bin
# Installed again only when the list of packages changes.
INSTALLED := .venv/.installed

.PHONY: setup browser test check demo clean
setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,verl]"
	touch $@

check: setup
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
test: setup check browser
	$(BIN)/pytest -n 2 --dist loadfile

clean:
	rm -rf .venv build
