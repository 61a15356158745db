# `make help` lists targets and variables.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# An environment named by the user is used as it is; the default one is made here, and updated with pyproject.toml.
READY := $(if $(filter .venv,$(VENV)),.venv/.ready)

# A misspelt variable would be ignored without a word: those that are typed must be used below.
USED = $(shell grep -oE '\$$\([A-Z]+\)' $(firstword $(MAKEFILE_LIST)) | tr -d '$$()') SHELL MAKEFLAGS
LISTED = $(shell sed -n 's/^.= \([A-Z]*\) = .*/\1/p' $(firstword $(MAKEFILE_LIST)))
NEAR = import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], 1, 0))
TYPED := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v))
$(if $(TYPED),$(foreach v,$(filter-out $(USED),$(TYPED)),$(error no variable $v: did you mean $\
$(shell $(PYTHON) -c '$(NEAR)' '$v' $(LISTED) 2>/dev/null || echo one of $(LISTED))? make help lists them)))

OVERRIDES = $(if $(NODES),'cluster.nodes=$(NODES)') $(if $(RANKS),'cluster.ranks_per_node=$(RANKS)') \
	$(if $(SEED),'seed=$(SEED)') $(if $(DATA),'data.path=$(DATA)') $(if $(CLUSTER),'cluster=$(CLUSTER)') \
	$(if $(HOSTS),'cluster.hosts="$(HOSTS)"') $(if $(SCALE),'scale=$(SCALE)') $(if $(OPT),'--methods=$(OPT)') $(ARGS)

EXPERIMENTS := resnet50 bert_squad cifar100 fashion_mnist digits ptb wikipedia

resnet50:      ## ResNet-50 on ImageNet: SGDM fp32 and bf16, 1-bit Adam, Birder (the main table)
bert_squad:    ## BERT-Base fine-tuned on SQuAD 1.1
cifar100:      ## ResNet on CIFAR-100
fashion_mnist: ## small images: Fashion-MNIST
digits:        ## small images that need no download: scikit-learn's digits
ptb:           ## word-level LSTM on Penn Treebank
wikipedia:     ## masked-language-model pre-training of BERT-Base

$(EXPERIMENTS): $(READY)
	@$(BIN)/python experiments/compare.py +exp=$@ $(OVERRIDES)

nodes: $(READY)  ## an experiment on 1, 2, 4 and 8 nodes, one after the other: make nodes EXP=resnet50 RANKS=2
	@for n in 1 2 4 8; do $(BIN)/python experiments/compare.py '+exp=$(EXP)' $(OVERRIDES) "cluster.nodes=$$n" || exit $$?; done

exp: $(READY)  ## any other experiment of conf/exp: make exp EXP=NAME
	@$(BIN)/python experiments/compare.py '+exp=$(EXP)' $(OVERRIDES)

cser zero_one_adam slamb: $(READY)
	@$(BIN)/python experiments/compare.py --paper $@ $(OVERRIDES)

cser:          ## CSER (NeurIPS 2020) and its family against SGD and 1-bit Adam, 5 minutes
zero_one_adam: ## 0/1 Adam (ICLR 2023) against Adam and 1-bit Adam, and its volume over whole runs, 5 minutes
slamb:         ## SLAMB (ICML 2023) against LAMB, 1-bit LAMB and 1-bit Adam, 5 minutes

methods: $(READY)  ## every method on Fashion-MNIST, tuned, 3 seeds: make methods DATA=ROOT (45 minutes, resumable)
	@$(BIN)/python experiments/all_methods.py $(OVERRIDES)

paper-table: $(READY)  ## the paper's speedup table, replayed on 1 to 8 emulated nodes of 8 A100 (17 minutes)
	@$(BIN)/python experiments/replay.py suite=paper $(ARGS)

bench: $(READY)  ## step time, bytes and memory beside PyTorch's hooks and others; the kernels (22 minutes)
	@$(BIN)/python experiments/replay.py suite=bench $(ARGS)

gpu-check: $(READY)  ## everything that wants a GPU: correctness, kernels, hooks, timelines, accuracy (20 minutes at most)
	@$(BIN)/python experiments/gpu_check.py $(ARGS)

predict: $(READY)  ## will it pay? make predict MODEL=hf:gpt2-medium GPU=h100 BATCH=8 SEQ=1024 NODES=4 RANKS=8 GBPS=100
	@$(BIN)/python experiments/predict.py $(if $(MODEL),'model=$(MODEL)') $(if $(BATCH),'batch=$(BATCH)') \
	  $(if $(GPU),'gpu=$(GPU)') $(if $(SEQ),'seq=$(SEQ)') $(if $(PRECISION),'precision=$(PRECISION)') $(if $(NODES),'cluster.nodes=$(NODES)') $(if $(RANKS),'cluster.ranks_per_node=$(RANKS)') \
	  $(if $(GBPS),'cluster.gbps=$(GBPS)') $(if $(OPT),'methods=$(OPT)') $(ARGS)

tables: $(READY)  ## write tables, plots and the figures of README and docs again, from the records: results/published, results/local
	@$(BIN)/python experiments/tables.py

page: $(READY)  ## one page to look at, for any browser, without a network: results/published/index.html (some minutes)
	@$(BIN)/python experiments/page.py

publish: $(READY)  ## move a group of runs of committed code to results/published: make publish GROUP=NAME (or EXP=NAME)
	@$(BIN)/python experiments/publish.py $(GROUP) $(if $(EXP),'--exp=$(EXP)')

# As many workers as cores, files and tests in random order (after a failure the seed is printed).
pytest = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadgroup

test: $(READY)  ## run the tests that protect a change
	@$(pytest) -m "not slow and not gpu and not cluster and not campaign and not habits"

test-all: $(READY)  ## run all tests but those of whole clusters
	@$(pytest) -m "not cluster and not campaign and not habits"

test-clusters: $(READY)  ## run the tests of whole clusters: emulated, ssh, SLURM, faults
	@$(BIN)/python -m pytest -q -p no:randomly -m cluster

mutants: $(READY)  ## put 24 faults into a copy of birder, one at a time: do the tests find them?
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.mutations

test-habits: $(READY)  ## the whole table of habits: what ordinary scripts do, with every method (docs/frameworks.md)
	@$(pytest) tests/distributed/test_habits.py

campaign: $(READY)  ## random faults on every optimizer, then resume; 30 minutes, goes on where it stopped (docs/reliability.md)
	@$(BIN)/python -m pytest -q -s -m campaign

soak: $(READY)  ## 16 ranks, 2,000 steps: memory, threads and files must stay flat
	@$(BIN)/python -m tests.campaign.soak

check: $(READY)  ## lint, format and type checks
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo --no-cache

test-torch:  ## tests that rest on private parts of torch, with another version: make test-torch TORCH=2.11.0
	@$(if $(TORCH),,echo "error: which version of torch? make test-torch TORCH=2.11.0" >&2; exit 2)
	@$(PYTHON) -m venv --upgrade-deps .venv-torch-$(TORCH)
	@.venv-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)' -e ".[cpu]" --group dev
	@.venv-torch-$(TORCH)/bin/python -m pytest -q tests/unit/birder tests/gpu tests/distributed

format: $(READY)  ## format the code
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

setup: $(READY)  ## make or update the environment and nothing else

clean:  ## remove the environment and caches; keeps outputs/ and results/
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON): install Python 3.11 or set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1): set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make environments: install python3-venv or set PYTHON=..." >&2; exit 2; }
	@echo "Setting up .venv (once, some minutes: PyTorch is large) ..."
	@$(PYTHON) -m venv --upgrade-deps .venv  # dependency groups want pip 25.1
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[cpu,hf,lightning]" --group dev
	@touch $@

help:  ## show this text
	@echo "Targets:"
	@awk -F ':.*## *' '/^[a-z0-9_-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables (unset: what the experiment's file says):"
	@awk '/^#= /{name = $$2; $$1 = $$2 = $$3 = ""; sub(/^ +/, ""); printf "  %-14s %s\n", name, $$0}' $(firstword $(MAKEFILE_LIST))
#= NODES = number of nodes; without a cluster they are emulated on this machine
#= RANKS = ranks (GPUs) per node
#= OPT = which optimizers, e.g. sgdm,birder
#= EXP = of make exp and make publish: a file of conf/exp
#= SEED = random seed
#= DATA = folder or file of the data set
#= CLUSTER = how nodes are started: local, emulated, virtual, ssh, slurm (a file of conf/cluster)
#= HOSTS = for CLUSTER=ssh: a,b,c or a file with one host per line
#= SCALE = auto, quick or paper
#= MODEL = for make predict: hf:gpt2-medium, torchvision:resnet101, package.module:function, 'params:1.3B layers=24', resnet50
#= BATCH = for make predict: samples per GPU
#= GPU = for make predict: e.g. a100, h100, rtx4090
#= SEQ = for make predict: tokens of a sample
#= PRECISION = for make predict: bf16, fp16, tf32 or fp32
#= GBPS = for make predict: Gbit/s of a node's NIC
#= ARGS = anything else for experiments/compare.py or replay.py, e.g. ARGS="optimizer.lr=0.01 train.max_steps=50"
#= GROUP = of make publish: the group of runs to move
#= TORCH = of make test-torch: a version of torch
#= PYTHON = the interpreter that makes .venv
#= VENV = an environment to use instead of .venv

.PHONY: page predict $(EXPERIMENTS) cser zero_one_adam slamb methods nodes exp bench gpu-check paper-table tables publish test test-all test-clusters test-habits test-torch mutants campaign soak check format setup clean help
