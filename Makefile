# Everything from a bare machine with python3 and make: `make demo`, `make test`, `make check`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all check format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/patchloom demo

# -n 2 because the tests are single-threaded and short; torch gets one thread in each worker.
test: $(READY)
	$(BIN)/pytest -n 2

test-all: $(READY)
	$(BIN)/pytest -n 2 -m 'slow or not slow'

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv
