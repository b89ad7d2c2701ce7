#!/usr/bin/env bash
# Builds the kernel for 64-bit Arm and runs it in qemu's user emulation, which executes the real instructions and says nothing
# about their speed.
#
#   kernels/tests/emulated/aarch64.sh [STEP…]     all steps, unless some are named:
#
#   kernels     the C++ tests of run.sh, as each processor of PROCESSORS: CASES random cases each (default 500). The bits must be
#               those that this processor computes
#   models      install the wheel for Arm of `.ci/release packages` beside Debian's Python and the other wheels for Arm; load
#               artifacts converted here (four small models, MiniLM) in each profile, as the processors MODELS_ON: load() judges
#               their golden samples (aarch64_models.py)
#   served      after models: bf16-serve in the emulator answers requests over gRPC, with the bits that this processor computes
#               (MiniLM: within budget)
#
# Debian's packages come from the mirror that apt uses here. They are unpacked into build/emulated/aarch64; nothing is installed.
# The cross compiler must be installed (Debian: apt-get install g++-aarch64-linux-gnu). DIST: a directory with the wheel, such as
# dist, which `make release` fills; without it the wheel is built.
# Exits with 0 and the reason if something cannot be had, unless REQUIRED=1. PYTHON: an interpreter that has the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

# Without bf16 instructions; with them: Graviton3, others; every feature that qemu knows. Each name also selects other kernels of ONNX Runtime.
read -ra processors <<<"${PROCESSORS:-neoverse-n1 neoverse-v1 neoverse-n2 max}"
name=aarch64 work=$PWD/build/emulated/aarch64 cxx=aarch64-linux-gnu-g++
mkdir -p "$work"

. kernels/tests/emulated/debian.sh

# The emulator of Debian 13 is one static file. That of Debian 12 is too old: ONNX Runtime crashes in it while it is loaded.
emulator() {
  qemu=$work/qemu-aarch64
  command -v "$cxx" >/dev/null || cannot "no $cxx (Debian: apt-get install g++-aarch64-linux-gnu)"
  [[ ! -x $qemu ]] || return 0
  need_debian
  unpack trixie amd64 "$work/unpacked" qemu-user
  mv "$work/unpacked/usr/bin/qemu-aarch64" "$qemu" && rm -r "$work/unpacked"
}

kernels() {
  local cases=(--cases "${CASES:-500}") status=0 test
  printf '#!/bin/bash\nstatus=0\nfor processor in %s; do echo "$processor:"; "%s" -cpu "$processor" "$@" || status=1; done\nexit "$status"\n' \
    "${processors[*]}" "$qemu" >"$work/on-each"
  chmod +x "$work/on-each"
  CXX="$cxx -static" OUT=aarch64 RUN=$work/on-each kernels/tests/run.sh "${cases[@]}" || status=1
  kernels/tests/run.sh "${cases[@]}" || status=1
  for test in property attention norm conv recurrent; do
    (($(cat build/kernel-test/{plain,aarch64}/"${test}"_test.log | grep -o 'digest [0-9a-f]*' | sort -u | wc -l) == 1)) ||
      { echo "FAILED: the bits of ${test}_test are not the same on all processors"; status=1; }
  done
  return "$status"
}

models() {
  local root=$work/root site=$work/site platforms=() glibc
  [[ -e $root/.complete ]] || unpack bookworm arm64 "$root" python3.11-minimal libpython3.11-stdlib libstdc++6 libc6
  [[ -n ${DIST:-} ]] || DIST=build/emulated/aarch64/dist PYTHON=$python .ci/release packages
  for glibc in 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  rm -rf "$site" "$work/models"
  "$python" -m pip install -qq --disable-pip-version-check --target "$site" "${platforms[@]}" --platform manylinux2014_aarch64 --no-compile \
    --python-version 3.11 --implementation cp --only-binary=:all: -c constraints.txt "$(echo "${DIST:-$work/dist}"/*_aarch64.whl)[cpu]" ||
    cannot "the wheels for aarch64 cannot be had"
  "$python" kernels/tests/emulated/aarch64_models.py convert "$work/models"
  for processor in ${MODELS_ON:-neoverse-n1 neoverse-v1}; do
    (arm "$processor" kernels/tests/emulated/aarch64_models.py load "$processor" "$work"/models/*)
  done
}

arm() {  # PROCESSOR ARGUMENT…: Python in the emulator
  local processor=$1; shift
  PYTHONHOME=$work/root/usr PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1 ORT_DISABLE_TELEMETRY=1 \
    exec "$qemu" -cpu "$processor" -L "$work/root" "$work/root/usr/bin/python3.11" "$@"
}

served() {
  # The server's shadow process cannot start, because the emulator is not registered for Arm's programs; its log says so.
  local server port=${PORT:-18001} status=0
  arm neoverse-v1 "$work/site/bin/bf16-serve" --repository "$work/models" --grpc-port "$port" --http-port 0 >"$work/served.log" 2>&1 &
  server=$!
  "$python" kernels/tests/emulated/aarch64_models.py ask "127.0.0.1:$port" "$work"/models/* || status=$?
  kill "$server"
  ((status == 0)) || { tail -20 "$work/served.log"; return "$status"; }
}

python=${PYTHON:-python3} steps=("$@")
((${#steps[@]})) || steps=(kernels models served)
emulator
for step in "${steps[@]}"; do
  [[ $step =~ ^(kernels|models|served)$ ]] || { echo "emulated aarch64: there is no step $step" >&2; exit 2; }
  "$step"
done
