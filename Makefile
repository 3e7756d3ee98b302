# Everything from a bare machine with python3 and make: `make demo`, `make test`, `make check`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all test-oldest check fuzz format clean

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

OLDEST := .venv-oldest/bin
# A broad part of the tests that takes about two minutes; the whole of them is for the newest versions.
OLDEST_TESTS := tests/cli/test_help.py tests/cli/test_table.py tests/cli/test_printed.py tests/recipes tests/training \
	tests/engine/test_loop.py tests/engine/test_resume.py tests/engine/test_optimisation.py tests/engine/test_records.py \
	tests/data/test_decode.py tests/data/test_folder.py tests/data/test_parquet.py tests/data/test_sources.py \
	tests/data/test_augment.py tests/data/test_vocabulary.py tests/objectives/test_classification.py \
	tests/serving tests/test_checkpoint.py tests/test_timm.py

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
		-e '.[parquet,stream,digits,translate,serve]' pytest pytest-xdist hypothesis
	touch .venv-oldest/.ready

test-oldest: .venv-oldest/.ready
	$(OLDEST)/pytest -n 2 $(OLDEST_TESTS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

FUZZ := .venv-fuzz/bin
FUZZ_SECONDS ?= 600

.venv-fuzz/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-fuzz
	$(FUZZ)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,fuzz]'
	touch .venv-fuzz/.ready

# Every reader in turn; `make fuzz FUZZ_SECONDS=20` to try it out.
fuzz: .venv-fuzz/.ready
	$(FUZZ)/python benchmarks/fuzz.py --seconds $(FUZZ_SECONDS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-oldest .venv-fuzz .fuzz
