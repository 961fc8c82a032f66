# Two commands do everything, the environment included:
#   make run     the main job: learn a cost from preferences, train PPO-Lag under it
#   make test    lint, types, tests
# ENV_ID= chooses the task, ARGS= passes anything else through; PYTHON= chooses the interpreter.
PYTHON ?= python3
ENV_ID ?= SafetyPointButton1-v0
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-fast lint bench toy pictures env clean

run: env
	$(BIN)/python cleanrl_scripts/ppo_lag_pbcrl.py --env-id $(ENV_ID) $(ARGS)

test: env lint
	$(BIN)/pytest $(ARGS)

test-fast: env
	$(BIN)/pytest -m "not slow" $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=.typings:cleanrl_scripts $(BIN)/mypy cleanrl_scripts/*.py tests/benchmarks/*.py

bench: env
	$(BIN)/python tests/benchmarks/bench_ppo_lag.py $(ARGS)

toy: env
	$(BIN)/python tests/benchmarks/bench_toy.py $(ARGS)

pictures: env
	$(BIN)/python docs/make_pictures.py $(ARGS)

env: $(READY)

$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet pip==26.3
	@echo "installing the pinned environment into $(VENV); this can take minutes"
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
