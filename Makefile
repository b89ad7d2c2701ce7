# The commands of the project. Developers and CI use the same targets. `make` alone lists them.
#
#   PYTHON=python3.12   the Python that .venv is made from (3.11 or newer)
#   VENV=.venv          the directory of the virtual environment
#   PYTEST_ARGS=…       more arguments for the test targets, e.g. PYTEST_ARGS='-k drift -x'
#   VARIANT=cpu         the variant of the server's image: cpu, cpu-torch, gpu or gpu-torch
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
RELEASE_ARGS ?=
ARM_ARGS ?=
FUZZ_ARGS ?=
# Tests start hundreds of Python processes: without bytecode, each would compile torch's modules again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
# ONNX Runtime 1.31 reports usage to its vendor unless this is set.
export ORT_DISABLE_TELEMETRY := 1

help: ## list these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2} /^## test-/ {printf "  make %-20s %s\n", substr($$0, 4, 13), substr($$0, 18)}' $(MAKEFILE_LIST)

# --- set-up -----------------------------------------------------------------------------------------------------------

setup: $(STAMP) ## create .venv with the versions in constraints.txt, and build the CPU kernel

# The stamp is written last: an interrupted set-up is repeated, a complete one is skipped.
$(STAMP): pyproject.toml conformance/pyproject.toml constraints.txt setup.py $(wildcard kernels/*/*.h kernels/*/*.inl kernels/*/*.cpp)
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) on PATH; install Python 3.11 or newer, or name another one: make PYTHON=python3.12 setup" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "setup: $(PYTHON) is $$($(PYTHON) -V 2>&1); bf16kit needs 3.11 or newer: make PYTHON=python3.12 setup" >&2; exit 1; }
	@[ -x $(BIN)/python ] && [ -x $(BIN)/pip ] || { \
		rm -rf $(VENV); echo "setup: creating $(VENV) from $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv $(VENV) || { echo "setup: $(PYTHON) cannot create environments (Debian: apt-get install python3-venv)" >&2; exit 1; }; }
	@echo "setup: installing the pinned versions into $(VENV) (1.6 GB, one to a few minutes)"
	@rm -f $(KERNEL)
	@$(BIN)/python -m pip $(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]' -e './conformance[test]'
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
image: ## build the images bf16kit:server (VARIANT=cpu, cpu-torch, gpu or gpu-torch) and bf16kit:converter; write their bills of materials to build/image
	@mkdir -p build/image
	$(BUILD) --target server -t $(IMAGE):server$(OF_VARIANT) .
	$(BUILD) --target bill-of-server --output build/image .
	$(BUILD) --target converter -t $(IMAGE):converter .
	$(BUILD) --target bill-of-converter --output build/image .

release: setup build/environments/release/.installed ## build wheels, source distribution and images, check them, run the demo from the wheel; fills dist; steps: RELEASE_ARGS (.ci/release)
	@PYTHON=$(BIN)/python .ci/release $(RELEASE_ARGS)

# --- checks and tests -------------------------------------------------------------------------------------------------

check: setup ## check format, lint, types, import rules, generated code and manifests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) proto
	@git diff --exit-code --stat -- bf16kit/protocol conformance/oip_conformance/protocol || { \
		echo "check: a protocol/ differs from what the .proto files generate; 'make proto' has just written it: commit that" >&2; exit 1; }
	$(MAKE) test-deploy

# One process per core, at most four because each takes 1.5 GB. A file's tests run in one process, files in collection order.
# For a debugger, PYTEST_ARGS='-n 0' runs all in one process. The slowest tests are printed; docs/decisions/0042 has the times.
side-by-side := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 15
elsewhere := not compose and not gpu and not models and not clients and not sources and not ray and not fuzz and not hostile and not manifests and not release

test: setup ## all quick tests: no Docker, no GPU; target: three minutes on two cores; prints the slowest tests
	@time $(BIN)/pytest $(side-by-side) -m 'not long and $(elsewhere)' $(PYTEST_ARGS)

# The other suites: the arguments of pytest, and the environments of each. `make` lists what the comments here say.
## test-long     the tests too slow for `make test`: many models, damaged files, killed processes, workers
suite-long := $(side-by-side) -m 'long and $(elsewhere)'
## test-hostile  attacks on a running server over real sockets; target: three minutes on two cores
suite-hostile := -m hostile tests/hostile --durations 10
## test-compose  start compose.yaml on a Docker engine, send requests, restart it, break it, check Prometheus' alerts
suite-compose := -m compose tests/compose tests/deploy --durations 10
## test-deploy   check the Helm chart, KServe's manifests and the compose files; part of `make check`
suite-deploy := -q -m manifests tests/deploy
needs-deploy := helm compose-schema
## test-ray      replicas behind Ray Serve, and conversions, on a real cluster of two nodes; one is killed (400 MB of packages)
suite-ray := -m ray tests/ray --durations 5
needs-ray := ray
## test-clients  KServe's and MLServer's own clients against the server (800 MB of packages)
suite-clients := -m clients tests/clients
needs-clients := kserve mlserver
## test-sources  convert, run and compare models written by TensorFlow, JAX and Lightning (3 GB of packages)
suite-sources := -n auto --maxprocesses 2 --dist loadfile --durations 10 -m sources tests/sources
needs-sources := tensorflow jax lightning
## test-models   convert and serve real ONNX models from packages on PyPI, and every kind of transformers model
suite-models := -m models
needs-models := models
## test-gpu      the tests that need an NVIDIA GPU; without one they are skipped, with the reason
suite-gpu := -m gpu
suites := $(patsubst suite-%,test-%,$(filter suite-%,$(.VARIABLES)))

# Ray listens on the machine's external address: run.sh gives it a network of its own.
python-ray = sh tests/ray/run.sh build/environments/ray/bin/python -m pytest
.SECONDEXPANSION:
$(suites): test-%: setup $$(addprefix build/environments/,$$(addsuffix /.installed,$$(needs-$$*)))
	@time $(or $(python-$*),$(BIN)/pytest) $(suite-$*) $(PYTEST_ARGS)

test-weekly: setup ## property tests and state machines with new examples; each benchmark; the lowest and the newest dependencies; Python 3.12 to 3.14; steps: WEEKLY_ARGS (.ci/weekly)
	@EXTRAS=$(EXTRAS) .ci/weekly $(WEEKLY_ARGS)

# Packages that conflict with those of .venv, or that few tests need, are in environments of their own: tests/environments/*.txt.
# `on-top` also see the packages of .venv; `alone` are installed without their dependencies; the tests skip without the `optional`.
on-top := ray lightning
alone := helm models
optional := helm compose-schema release
build/environments/%/.installed: tests/environments/%.txt constraints.txt | setup
	@echo "make: installing tests/environments/$*.txt into $(@D)"
	@rm -rf $(@D) && $(BIN)/python -m venv --without-pip $(@D)
	@[ -z "$(filter $*,$(on-top))" ] || $(@D)/bin/python -c "import pathlib, sys, sysconfig; \
		own = sysconfig.get_path('purelib'); theirs = own.replace(sys.prefix, '$(abspath $(VENV))'); \
		pathlib.Path(own, 'under.pth').write_text(f'import site; site.addsitedir({theirs!r})\n')"
	@$(BIN)/python -m pip --python $(@D)/bin/python $(INSTALL) $(if $(filter $*,$(alone)),--no-deps) -r $< && \
	{ [ $* != helm ] || $(@D)/bin/python tests/support/helm.py $(@D)/bin; } && touch $@ || \
	{ [ -n "$(filter $*,$(optional))" ] && rm -rf $(@D) && echo "make: $* cannot be installed here: the tests that need it are skipped"; }

KERNEL_CASES ?= 10000
test-kernel: setup ## the C++ kernel under sanitizers: 10,000 random cases against float64 (KERNEL_CASES), then inside ONNX Runtime
	@time nice kernels/tests/run.sh --sanitize --cases $(KERNEL_CASES)
	@time PYTHON=$(BIN)/python nice kernels/tests/in_onnxruntime.sh

test-kernel-versions: setup ## the kernel inside every minor release of ONNX Runtime since 1.21: 11 wheels, one to two minutes
	PYTHON=$(BIN)/python kernels/tests/versions.sh

test-kernel-emulated: setup ## the AMX path in an emulator, with a layer of MiniLM: half a minute, 0.5 GB of packages; skipped without them
	@time PYTHON=$(BIN)/python kernels/tests/emulated/amx.sh

test-kernel-aarch64: setup build/environments/release/.installed ## the kernel for 64-bit Arm, in an emulator; without packages for it skipped, with the reason; steps: ARM_ARGS (kernels/tests/emulated/aarch64.sh)
	@time PYTHON=$(BIN)/python kernels/tests/emulated/aarch64.sh $(ARM_ARGS)

conformance: setup ## the conformance suite's own tests, then the suite against the demo's server; options for it: CONFORMANCE_ARGS
	$(BIN)/pytest -q -n auto --maxprocesses 4 conformance/tests $(PYTEST_ARGS)
	@[ -d build/demo/minilm/1 ] || $(MAKE) demo
	@$(BIN)/python deploy/demo/conform.py $(CONFORMANCE_ARGS)

soak: setup ## the attacks of test-hostile at full length, one to two hours; writes docs/reliability.md
	@rm -rf build/soak && mkdir -p build/soak
	@status=0; BF16KIT_SOAK=1 BF16KIT_FIGURES=build/soak/figures.jsonl $(BIN)/pytest -m hostile tests/hostile $(PYTEST_ARGS) || status=$$?; \
	BF16KIT_SOAK=1 $(BIN)/python tests/support/figures.py build/soak/figures.jsonl docs/reliability.md; exit $$status

fuzz: setup ## convert 20,000 damaged sources, SIGKILL 50 conversions; all cores, half an hour on two; writes docs/reliability-converter.md
	@$(BIN)/pytest -q -m fuzz tests/fuzz $(PYTEST_ARGS)
	@PYTHONPATH=tests/support OMP_NUM_THREADS=1 $(BIN)/python -m fuzzing $(FUZZ_ARGS)

# The message package is renamed to bf16kit.inference, so that the stubs and tritonclient's can be loaded in one process. The
# conformance suite has its own files, with packages of its own.
PROTO_TMP := build/proto
proto: setup ## regenerate bf16kit/protocol from proto/, and the conformance suite's stubs from conformance/proto/
	@rm -rf $(PROTO_TMP) && mkdir -p $(PROTO_TMP)/{bf16kit,oip_conformance}/protocol
	@sed "s/^package inference;$$/package bf16kit.inference;/" proto/inference.proto > $(PROTO_TMP)/bf16kit/protocol/inference.proto
	@cp conformance/proto/*.proto $(PROTO_TMP)/oip_conformance/protocol/
	@cd $(PROTO_TMP) && protoc=($(abspath $(BIN))/python -m grpc_tools.protoc --proto_path=.) && \
		"$${protoc[@]}" --python_out=$(CURDIR) --pyi_out=$(CURDIR) bf16kit/protocol/*.proto && \
		"$${protoc[@]}" --python_out=$(CURDIR)/conformance --pyi_out=$(CURDIR)/conformance oip_conformance/protocol/*.proto

docs: setup ## write the tables of docs/configuration.md from the code
	@PYTHONPATH=tests/support $(BIN)/python tests/support/settingspage.py docs/configuration.md

# --- numbers ----------------------------------------------------------------------------------------------------------

bench: setup ## measure all goals at this commit, write bench/results/MACHINE, README and docs; half an hour; needs an idle machine
	@$(BIN)/python -m pip $(INSTALL) -c constraints.txt openvino zentorch
	@$(BIN)/python -m bench readme

bench-kernel: setup ## compare the kernel with ONNX Runtime, OpenVINO, torch and zentorch; writes docs/kernel.md; 35 minutes; needs an idle machine
	@$(BIN)/python -m pip $(INSTALL) -c constraints.txt openvino zentorch
	@status=0; $(BIN)/python -m bench kernel kernel_minilm kernel_lm kernel_drift || status=$$?; \
	$(BIN)/python -m bench.report || status=1; exit $$status

bench-quick: setup ## run each benchmark with few repetitions, to see that it still runs; publishes nothing; part of make test-weekly
	@$(BIN)/python -m pip $(INSTALL) -c constraints.txt openvino zentorch
	@$(BIN)/python -m bench all --quick

bench-drift: setup ## measure which faults live drift detects, and how soon; writes docs/drift.md
	@rm -f build/faults.jsonl && mkdir -p build
	@BF16KIT_FAULTS=build/faults.jsonl $(BIN)/pytest -q -n 0 tests/e2e/test_drift_faults.py tests/e2e/test_service_faults.py -k 'not the_page_has'
	@$(BIN)/python tests/support/drifttable.py build/faults.jsonl docs/drift.md

bench-gpu: setup ## compare bf16 with fp32 and TF32 on an NVIDIA GPU; without one it is skipped, with the reason
	@$(BIN)/python -m bench gpu

clean: ## remove the files that builds and tests leave behind; .venv stays
	rm -rf build dist ./*.egg-info conformance/{build,.pytest_cache,*.egg-info} .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: help setup check docs test $(suites) test-weekly test-kernel test-kernel-versions test-kernel-emulated test-kernel-aarch64 demo serve image release conformance soak fuzz proto bench bench-kernel bench-quick bench-drift bench-gpu clean
