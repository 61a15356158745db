# `make help` lists targets and variables.
.DEFAULT_GOAL := help
SHELL := /bin/bash
# One target after the other, also with -j, which MAKEFLAGS may hold: two comparisons at once would time each other.
.NOTPARALLEL:
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# An environment named by the user is used as it is; the default one is made here, and updated with pyproject.toml.
READY := $(if $(filter .venv,$(VENV)),.venv/.ready)

EXPERIMENTS := resnet50 bert_squad cifar100 fashion_mnist digits ptb wikipedia
RUNS := $(EXPERIMENTS) exp methods cser zero_one_adam slamb

# A misspelt variable would be ignored without a word: those that are typed must be used below.
USED = $(shell grep -oE '\$$\([A-Z]+\)' $(firstword $(MAKEFILE_LIST)) | tr -d '$$()') SHELL MAKEFLAGS
LISTED = $(shell sed -n 's/^.= \([A-Z]*\) = .*/\1/p' $(firstword $(MAKEFILE_LIST)))
NEAR = import difflib as d, sys; _, x, *all = sys.argv; $\
print(max(all, key=lambda k: d.SequenceMatcher(None, x.lower(), k.lower()).ratio()))
TYPED := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v))
$(if $(TYPED),$(foreach v,$(filter-out $(USED),$(TYPED)),$(error no variable $v: did you mean $\
$(shell $(PYTHON) -c '$(NEAR)' '$v' $(LISTED) 2>/dev/null || echo one of $(LISTED))? make help lists them)))
# So would one of another target: those that help says are "of" some targets are of these alone. runs: all of RUNS.
OF = $(subst runs,$(RUNS),$(shell sed -n 's/^.= $1 = of \([a-z -]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST))))
ASTRAY = $(if $(call OF,$1),$(filter-out help $(call OF,$1),$(MAKECMDGOALS)))
$(foreach v,$(TYPED),$(if $(call ASTRAY,$v),$(error make $(firstword $(call ASTRAY,$v)) has no variable $v: $v is of make $\
$(call OF,$v))))

# One that is exported in the user's shell counts as well, but not without a word.
$(foreach v,$(filter-out PYTHON VENV,$(LISTED)),$(if $(filter environment,$(origin $v)),$(if $(call ASTRAY,$v),,$\
$(shell echo "$v comes from the environment" >&2))))

# What the user gives is text: make would take $b in a path for a variable, and drop it. ARGS are words for the shell.
$(foreach v,$(filter-out ARGS,$(LISTED)),$(eval override $v := $$(value $v)))
# A value in the shell's quotes, whatever is in it.
q = '$(subst ','\'',$1)'
OVERRIDES = $(if $(NODES),$(call q,cluster.nodes=$(NODES))) $(if $(RANKS),$(call q,cluster.ranks_per_node=$(RANKS))) \
	$(if $(SEED),$(call q,seed=$(SEED))) $(if $(DATA),$(call q,data.path=$(DATA))) $(if $(CLUSTER),$(call q,cluster=$(CLUSTER))) \
	$(if $(HOSTS),$(call q,cluster.hosts="$(HOSTS)")) $(if $(SCALE),$(call q,scale=$(SCALE))) $(if $(OPT),$(call q,--methods=$(OPT))) \
	$(ARGS)
# The experiment that the user names, or one line that says how.
NAMED = $(call q,+exp=$(or $(EXP),$(error which experiment? make $@ EXP=digits (files of conf/exp))))

resnet50:      ## try: ResNet-50, synthetic images: does compression pay? 4 minutes
bert_squad:    ## reproduce: BERT-Base fine-tuned on SQuAD 1.1
cifar100:      ## reproduce: ResNet on CIFAR-100
fashion_mnist: ## reproduce: small images: Fashion-MNIST
digits:        ## try: small images that need no download, with accuracies
ptb:           ## reproduce: word-level LSTM on Penn Treebank
wikipedia:     ## reproduce: masked-language-model pre-training of BERT-Base

$(EXPERIMENTS): $(READY)
	@$(BIN)/python experiments/compare.py +exp=$@ $(OVERRIDES)

nodes: $(READY)  ## reproduce: on 1, 2, 4, 8 nodes: make nodes EXP=resnet50 RANKS=2
	@for n in 1 2 4 8; do $(BIN)/python experiments/compare.py $(NAMED) $(OVERRIDES) "cluster.nodes=$$n" || exit $$?; done

exp: $(READY)  ## reproduce: any other file of conf/exp: make exp EXP=NAME
	@$(BIN)/python experiments/compare.py $(NAMED) $(OVERRIDES)

cser zero_one_adam slamb: $(READY)
	@$(BIN)/python experiments/compare.py --paper $@ $(OVERRIDES)
	@$(if $(filter zero_one_adam,$@),$(BIN)/python studies/volume.py --print-only)

cser:          ## reproduce: CSER (NeurIPS 2020) and its family, 5 minutes
zero_one_adam: ## reproduce: 0/1 Adam (ICLR 2023) and its volume, 5 minutes
slamb:         ## reproduce: SLAMB (ICML 2023) and relatives, 5 minutes

methods: $(READY)  ## reproduce: every method on Fashion-MNIST, 3 seeds, 45 minutes
	@$(BIN)/python experiments/all_methods.py $(OVERRIDES)

paper-table: $(READY)  ## reproduce: the paper's speedups, replayed (20 minutes)
	@$(BIN)/python experiments/replay.py suite=paper $(ARGS)

bench: $(READY)  ## reproduce: compared with PyTorch's hooks; the kernels (43 minutes)
	@$(BIN)/python experiments/replay.py suite=bench $(ARGS)

gpu-check: $(READY)  ## reproduce: everything that needs a GPU (20 minutes at most)
	@$(BIN)/python experiments/gpu_check.py $(ARGS)

predict: $(READY)  ## try: will it pay? MODEL=hf:gpt2 GPU=h100 BATCH=8 NODES=4 GBPS=25
	@$(BIN)/python experiments/predict.py $(if $(MODEL),$(call q,model=$(MODEL))) $(if $(BATCH),$(call q,batch=$(BATCH))) \
	  $(if $(GPU),$(call q,gpu=$(GPU))) $(if $(SEQ),$(call q,seq=$(SEQ))) $(if $(PRECISION),$(call q,precision=$(PRECISION))) \
	  $(if $(NODES),$(call q,cluster.nodes=$(NODES))) $(if $(RANKS),$(call q,cluster.ranks_per_node=$(RANKS))) \
	  $(if $(GBPS),$(call q,cluster.gbps=$(GBPS))) $(if $(OPT),$(call q,methods=$(OPT))) $(ARGS)

tables: $(READY)  ## reproduce: tables, plots and pages again, from the records
	@$(BIN)/python experiments/tables.py

page: $(READY)  ## try: all results as one page for a browser (some minutes)
	@$(BIN)/python experiments/page.py

publish: $(READY)  ## develop: a group of runs to results/published: GROUP=NAME
	@$(BIN)/python experiments/publish.py $(if $(GROUP),$(call q,$(GROUP))) $(if $(EXP),$(call q,--exp=$(EXP)))

# Three processes for two cores, as tests wait for each other's ranks; files and tests in random order (after a failure the seed
# is printed). tests/conftest.py says what comes first. Compiled modules are kept even where the environment says no: the tests start
# hundreds of Python processes.
WORKERS ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
pytest = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test: $(READY)  ## develop: the tests that protect a change
	@$(pytest) -m "not slow and not gpu and not cluster and not campaign and not habits"

test-all: $(READY)  ## develop: all tests
	@$(pytest) -m "not campaign and not habits"

test-clusters: $(READY)  ## develop: tests of whole clusters: emulated, ssh, SLURM, faults
	@$(pytest) -m cluster

mutants: $(READY)  ## develop: 24 faults in a copy of birder: do the tests find them?
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.mutations

test-habits: $(READY)  ## develop: what ordinary scripts do, with every method (1 hour)
	@$(pytest) tests/distributed/test_habits.py

campaign: $(READY)  ## develop: random faults, then resume (30 minutes, resumable)
	@$(BIN)/python -m pytest -q -s -m campaign

soak: $(READY)  ## develop: 16 ranks, 2,000 steps: memory and files stay flat
	@$(BIN)/python -m tests.campaign.soak

docs: $(READY)  ## develop: the site, site/index.html; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(READY)  ## develop: lint, format, types, imports, plain English
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/python -m tests.docs.plain_english

test-torch:  ## develop: with another torch: make test-torch TORCH=2.11.0
	@$(if $(TORCH),,echo "error: which version of torch? make test-torch TORCH=2.11.0" >&2; exit 2)
	@$(PYTHON) -m venv --upgrade-deps .venv-torch-$(TORCH)
	@.venv-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)' -e ".[cpu]" --group dev
	@.venv-torch-$(TORCH)/bin/python -m pytest -q tests/unit/birder tests/gpu tests/distributed

format: $(READY)  ## develop: format the code
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

dist: $(READY)  ## develop: wheel and sdist in dist/, checked with twine
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist
	@$(BIN)/python -m twine check --strict dist/*

setup: $(READY)  ## develop: make or update the environment and nothing else

clean:  ## develop: remove environment and caches; keeps results/
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON): install Python 3.11 or set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1): set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make environments: install python3-venv or set PYTHON=..." >&2; exit 2; }
	@echo "Setting up .venv (once, some minutes: PyTorch is large) ..."
	@$(PYTHON) -m venv --upgrade-deps .venv  # dependency groups want pip 25.1
	@.venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[cpu,hf,lightning]" --group dev
	@touch $@

help:  ## develop: show this text
	@for group in try reproduce develop; do echo "To $$group:"; \
	  awk -F ":.*## *$$group: " '/^[a-z0-9_-]+:.*## / && NF > 1 {printf "  %-14s %s\n", $$1, $$2}' \
	  $(firstword $(MAKEFILE_LIST)); done
	@echo "Variables (unset: what the experiment's file says; runs: targets that train):"
	@awk '/^#= /{name = $$2; $$1 = $$2 = $$3 = ""; sub(/^ +/, ""); printf "  %-14s %s\n", name, $$0}' $(firstword $(MAKEFILE_LIST))
#= NODES = of runs predict: number of nodes, all here without a cluster
#= RANKS = of runs nodes predict: ranks (GPUs) per node
#= OPT = of runs nodes predict: e.g. sgdm,birder (predict: bf16,birder)
#= EXP = of exp nodes publish: a file of conf/exp
#= SEED = of runs nodes: random seed
#= DATA = of runs nodes: folder or file of the data set
#= CLUSTER = of runs nodes: local, emulated, virtual, ssh or slurm
#= HOSTS = of runs nodes: for CLUSTER=ssh a,b,c or a file, a host per line
#= SCALE = of runs nodes: auto, quick or paper
#= MODEL = of predict: hf:gpt2, torchvision:resnet101, 'params:1.3B ...'
#= BATCH = of predict: samples per GPU
#= GPU = of predict: e.g. a100, h100, rtx4090
#= SEQ = of predict: tokens of a sample
#= PRECISION = of predict: bf16, fp16, tf32 or fp32
#= GBPS = of predict: Gbit/s of a node's NIC
#= ARGS = of runs nodes predict bench paper-table gpu-check: key=value
#= GROUP = of publish: the group of runs to move
#= TORCH = of test-torch: a version of torch
#= PYTHON = the interpreter that makes .venv
#= VENV = an environment to use instead of .venv

# A misspelt target: the nearest one, or how an experiment without a target of its own is run.
TARGETS = $(shell sed -n 's/^\([a-z][a-z0-9_-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))
# So is a folder's name, which make would find up to date: make tests would end well and test nothing.
FOLDERS := $(filter-out $(TARGETS),$(filter $(wildcard *),$(MAKECMDGOALS)))
.PHONY: $(FOLDERS)
$(FOLDERS) .DEFAULT:
	@$(if $(wildcard conf/exp/$@.yaml),near="exp EXP=$@",near=$$($(PYTHON) -c '$(NEAR)' '$@' $(TARGETS))); \
	echo "error: no target '$@'; did you mean make $$near? make help lists them" >&2; exit 2

.PHONY: docs dist page predict $(EXPERIMENTS) cser zero_one_adam slamb methods nodes exp bench gpu-check paper-table tables publish test test-all test-clusters test-habits test-torch mutants campaign soak check format setup clean help
