# Two commands do everything, the environment included:
#   make run     the main job: learn a cost from preferences, train PPO-Lag under it, on the lane
#                change, where λ follows the share of fresh episodes that are unsafe
#   make test    lint, types, tests (`make lint` and `make pytest`)
# ENV_ID= chooses the task, ARGS= passes anything else through; PYTHON= chooses the interpreter, and
# WORKERS= how many tests run at a time.
# `make test-all` adds the tests that take minutes, which `.ci/nightly` runs.
# `make test-gymnasium` runs the fast tests of `pbcrl` on older versions of Gymnasium.
# `make test-imitation` runs the adapter for imitation, whose pins exclude the rest, against it.
# `make parity` compares the robot tasks with the real Safety-Gymnasium in a second environment, and
# trains OmniSafe and FSRL there under a learned cost;
# PARITY_PYTHON= chooses its interpreter, 3.10 or 3.11. `make parity-full` plays whole episodes, too.
# `make bench` measures how fast everything is, beside OmniSafe and Safety-Gymnasium: docs/notebook/speed.md.
# `make people` goes from an env without a cost to a certified policy, by a scripted person's answers.
# `make tokens` compares learned costs of language models with true ones, on two small tasks.
# `make sb3` trains PPO of Stable-Baselines3 by the recipe of docs/adapters.md, told the cost and not.
# `make demo` learns a cost on the toy and draws it; `make docs` builds the documentation.
# `make benchmark PRESET=` reruns a table of the paper, `make smoke` all methods in a few minutes.
PYTHON ?= python3
ENV_ID ?= DrivingLaneChange-v0
ARGS ?=
PRESET ?= results
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

PARITY_PYTHON ?= $(firstword $(shell command -v python3.11 python3.10) $(PYTHON))
PARITY_VENV := .venv-parity
PARITY_BIN := $(PARITY_VENV)/bin
PARITY_PACKAGES := $(PARITY_VENV)/.packages
PARITY_READY := $(PARITY_VENV)/.ready

# The oldest one, and the first whose vector envs say when they reset themselves.
GYMNASIUMS := 0.28.1 1.1.0
# With the oldest goes the oldest NumPy, where Python still has it.
WITH_0.28.1 := "numpy==1.26.4; python_version < '3.13'"

# Workers and the scripts that tests start share the cores: more threads each would only wait.
QUIETLY := OMP_NUM_THREADS=1
# Several tests at a time; a free worker takes over tests that wait for another.
PARALLEL := -n $(WORKERS) --dist worksteal

.PHONY: run test pytest test-all test-fast test-gymnasium test-imitation lint parity parity-full bench benchmark smoke toy queries people driving tokens sb3 demo docs wheel pictures env parity-packages parity-env clean
.PRECIOUS: $(VENV)-gymnasium-%/.ready

run: env
	$(BIN)/python cleanrl_scripts/ppo_lag_pbcrl.py --env-id $(ENV_ID) $(ARGS)

test: lint pytest

pytest: env
	$(QUIETLY) $(BIN)/pytest $(PARALLEL) -m "not nightly" $(ARGS)

test-all: env lint
	$(QUIETLY) $(BIN)/pytest $(ARGS)

test-fast: env
	$(QUIETLY) $(BIN)/pytest $(PARALLEL) -m "not slow and not nightly" $(ARGS)

test-gymnasium: $(GYMNASIUMS:%=test-gymnasium-%)

test-gymnasium-%: $(VENV)-gymnasium-%/.ready
	$(QUIETLY) PYTHONPATH=$(CURDIR)/$(VENV)-gymnasium-$* $(BIN)/pytest $(PARALLEL) -m "not slow and not nightly" $(ARGS) tests/test_*.py

test-imitation: $(VENV)-imitation/.ready
	$(QUIETLY) PYTHONPATH=$(CURDIR)/$(VENV)-imitation $(BIN)/pytest $(ARGS) tests/adapters/test_imitation.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=.typings:cleanrl_scripts:cleanrl_scripts/paper:tests/benchmarks $(BIN)/mypy --explicit-package-bases --exclude 'cleanrl_scripts/(paper/)?__init__.py' cleanrl_scripts tests/benchmarks

# Not several at a time: the tests wait for the real package, which takes two processes by itself.
parity: env parity-env
	$(QUIETLY) PBCRL_PARITY_PYTHON=$(PARITY_BIN)/python $(BIN)/pytest tests/parity -m "not nightly" $(ARGS)

parity-full: env parity-env
	$(QUIETLY) PBCRL_PARITY_PYTHON=$(PARITY_BIN)/python $(BIN)/pytest tests/parity $(ARGS)

bench: env parity-env
	$(BIN)/python tests/benchmarks/bench_omnisafe.py --omnisafe-python $(PARITY_BIN)/python
	$(BIN)/python tests/benchmarks/bench_ppo_lag.py
	$(BIN)/python tests/benchmarks/bench_trainer.py
	$(BIN)/python tests/benchmarks/bench_trees.py
	$(BIN)/python tests/benchmarks/bench_wrapper.py
	$(BIN)/python tests/benchmarks/bench_robotics.py --parity-python $(PARITY_BIN)/python

benchmark: env
	$(BIN)/python cleanrl_scripts/paper/benchmark.py --preset $(PRESET) $(ARGS)
	$(BIN)/python cleanrl_scripts/paper/report.py

smoke: env
	rm -rf runs/smoke
	$(BIN)/python cleanrl_scripts/paper/benchmark.py --preset smoke --seeds 1 --runs-dir runs/smoke $(ARGS)
	$(BIN)/python cleanrl_scripts/paper/report.py --runs-dir runs/smoke --out runs/smoke/report

toy: env
	$(BIN)/python tests/benchmarks/bench_toy.py $(ARGS)

queries: env
	$(BIN)/python tests/benchmarks/bench_queries.py $(ARGS)

people: env
	$(BIN)/python tests/benchmarks/bench_people.py $(ARGS)

driving: env
	$(BIN)/python tests/benchmarks/bench_driving.py $(ARGS)

tokens: env
	$(QUIETLY) $(BIN)/python tests/benchmarks/bench_llm.py $(ARGS)

sb3: env
	$(QUIETLY) $(BIN)/python tests/benchmarks/bench_sb3.py $(ARGS)

# Strict: a warning, a broken link included, fails.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

demo: env
	$(BIN)/pbcrl demo $(ARGS)

# The source distribution, and the wheel made of it.
wheel: env
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist

pictures: env
	$(BIN)/python docs/make_pictures.py $(ARGS)

env: $(READY)

$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet pip==26.3
	@echo "installing the pinned environment into $(VENV); this can take minutes"
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable ".[dev]"
	touch $@

# Only what differs, to stand before the packages of $(VENV): a second PyTorch would take minutes.
$(VENV)-gymnasium-%/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) gymnasium==$* $(WITH_$*)
	PYTHONPATH=$(CURDIR)/$(@D) $(BIN)/python -c "import gymnasium; assert gymnasium.__version__ == '$*'"
	touch $@

# Its pins exclude current Gymnasium and Stable-Baselines3, and yet the parts in question run on both.
$(VENV)-imitation/.ready: $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) imitation==1.0.1
	touch $@

# All of it but pbcrl, whose folder no other installation may be at work in meanwhile.
parity-packages: $(PARITY_PACKAGES)

$(PARITY_PACKAGES): .ci/parity-requirements.txt .ci/constraints.txt
	$(PARITY_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet pip==26.3
	@echo "installing $< into $(@D), which has Safety-Gymnasium 1.0.0, its MuJoCo 2.3.3, OmniSafe and FSRL"
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(@D)/bin/python -m pip install --quiet --constraint .ci/constraints.txt safetensors setuptools torch
	touch $@

parity-env: $(PARITY_READY)

$(PARITY_READY): $(PARITY_PACKAGES) pyproject.toml
	$(@D)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-gymnasium-* $(VENV)-imitation $(PARITY_VENV) build *.egg-info
