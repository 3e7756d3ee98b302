# Everything from a bare machine with python3 and make: `make demo`, `make test`, `make check`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-fast test-all test-oldest test-gpu coverage lint check docs house fuzz format \
	dist release-check sbom audit clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./runtime -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/patchloom train digits --out runs/demo --epochs 30 \
		--set augment.crop=resize --set augment.mixup=0 --set optim.lr=3e-3

# -n 2 because the tests are single-threaded and short; torch gets one thread in each worker.
test: $(READY)
	$(BIN)/pytest -n 2

# Every folder of tests, about two minutes on two idle cores.
FAST_TESTS := tests/architecture tests/cli/test_data_arguments.py tests/cli/test_help.py tests/cli/test_printed.py \
	tests/cli/test_table.py tests/contracts/test_pyramids.py tests/data/test_augment.py tests/runtime/test_decode.py \
	tests/data/test_folder.py tests/data/test_loader.py tests/data/test_mixing.py tests/data/test_objects.py \
	tests/data/test_sources.py tests/data/test_splits.py tests/tasks/segmentation/test_pixel_classes.py \
	tests/inference/test_image_inputs.py tests/inference/test_index.py tests/report/test_notebook.py \
	tests/engine/test_loop.py tests/engine/test_optimization.py tests/engine/test_records.py \
	tests/engine/test_resume.py tests/evaluation/test_classification.py tests/evaluation/test_detection.py \
	tests/evaluation/test_retrieval.py tests/evaluation/test_segmentation.py tests/evaluation/test_translation.py \
	tests/fuzz tests/report/pictures/test_attention.py tests/models/test_cost.py tests/report/pictures/test_pictures.py \
	tests/layers/test_token_mixing.py tests/models/test_beam_search.py tests/models/test_dense.py \
	tests/models/test_detector.py tests/models/test_seq2seq.py tests/models/test_weights_table.py \
	tests/objectives/test_classification.py tests/objectives/test_distillation.py \
	tests/objectives/test_segmentation.py tests/objectives/test_translation.py tests/recipes \
	tests/reliability/test_checksums.py tests/reliability/test_mistakes.py tests/serving/test_admission.py \
	tests/serving/test_exchange.py tests/serving/test_routes.py tests/serving/test_uploads.py \
	tests/training/test_assemble.py tests/training/test_run_folders.py tests/training/test_start.py \
	tests/runs/test_checkpoints.py tests/test_docs.py tests/test_house.py tests/test_signatures.py tests/tasks/test_tasks.py \
	tests/test_timm.py

test-fast: $(READY)
	$(BIN)/pytest -n 2 $(FAST_TESTS)

test-all: $(READY)
	$(BIN)/pytest -n 2 -m 'slow or not slow'

OLDEST := .venv-oldest/bin
# A broad part of the tests that takes about two minutes; the whole of them is for the newest versions.
OLDEST_TESTS := tests/cli/test_help.py tests/cli/test_table.py tests/cli/test_printed.py tests/recipes tests/training \
	tests/engine/test_loop.py tests/engine/test_resume.py tests/engine/test_optimization.py tests/engine/test_records.py \
	tests/runtime/test_decode.py tests/data/test_folder.py tests/data/test_parquet.py tests/data/test_sources.py \
	tests/data/test_augment.py tests/runtime/test_vocabulary.py tests/objectives/test_classification.py \
	tests/serving tests/runs/test_checkpoints.py tests/test_timm.py

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt \
		-e ./runtime -e '.[parquet,stream,digits,translate,serve]' pytest pytest-xdist hypothesis
	touch .venv-oldest/.ready

test-oldest: .venv-oldest/.ready
	$(OLDEST)/pytest -n 2 $(OLDEST_TESTS)

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 patchloom runtime # text files name their encoding
	$(BIN)/mypy

check: lint test

# The site, into site/, without a network; `make check` builds it too (tests/test_docs.py).
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Processes that the tests start are not measured.
coverage: $(READY)
	$(BIN)/pytest -n 2 --cov=patchloom --cov-report=term:skip-covered

# `$(PYTHON) tools/house.py --list METRIC` lists the places, `--draw SEED` draws prose to review.
house:
	@$(PYTHON) tools/house.py

FUZZ := .venv-fuzz/bin
FUZZ_SECONDS ?= 600

.venv-fuzz/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-fuzz
	$(FUZZ)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./runtime -e '.[dev,fuzz]'
	touch .venv-fuzz/.ready

# Every reader in turn; `make fuzz FUZZ_SECONDS=20` to try it out.
fuzz: .venv-fuzz/.ready
	$(FUZZ)/python benchmarks/fuzz.py --seconds $(FUZZ_SECONDS)

RELEASE := .venv-release/bin

.venv-release/.ready: constraints.txt
	$(PYTHON) -m venv .venv-release
	$(RELEASE)/pip install --quiet --disable-pip-version-check -c constraints.txt \
		build hatchling twine cyclonedx-bom pip-audit
	touch .venv-release/.ready

# docs/releasing.md describes these four. They use tools/release.py.
dist: .venv-release/.ready
	$(RELEASE)/python tools/release.py build

release-check: dist
	$(RELEASE)/python tools/release.py check --python $(PYTHON)

sbom: .venv-release/.ready
	$(RELEASE)/python tools/release.py sbom --python $(PYTHON)

# Asks the database of the Python Packaging Authority about every package that `make sbom` lists.
audit: sbom
	$(RELEASE)/pip-audit --path .release/core/lib/python*/site-packages

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-oldest .venv-fuzz .venv-release .release .fuzz
