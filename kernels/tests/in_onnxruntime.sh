#!/usr/bin/env bash
# Runs the tests that load the kernel into ONNX Runtime on a library with AddressSanitizer and UndefinedBehaviorSanitizer, which it
# links from what `run.sh --sanitize` has compiled. PYTHON: an interpreter that has the project and pytest. CXX: as for run.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. kernels/tests/operators.sh

out=$PWD/build/kernel-test/sanitized
[[ -f $out/portable.o && -z $(find kernels/{gemm,isa} -type f -newer "$out/portable.o") ]] ||
  { echo "in_onnxruntime.sh: the kernel has changed: run kernels/tests/run.sh --sanitize first" >&2; exit 1; }
read -ra compiler <<<"${CXX:-g++}"
flags=(-Ikernels -std=c++17 -O1 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -Wno-psabi -fsanitize=address,undefined -fno-sanitize-recover=all)
objects=()
for source in kernels/{gemm,isa,ort,rounding}/*.cpp; do
  objects+=("$out/$(basename "$source" .cpp).o")
  [[ $source =~ ^kernels/(gemm|isa)/ ]] || "${compiler[@]}" "${flags[@]}" -c "$source" -o "${objects[-1]}"
done
"${compiler[@]}" -shared -fsanitize=address,undefined "${objects[@]}" -o "$out/_bf16kernel.so"

# The interpreter is not built with the sanitizers, so they must be preloaded. Leaks are not checked, because the interpreter and
# ONNX Runtime leak themselves.
preload=""
for library in libasan.so libubsan.so libstdc++.so.6; do preload+=" $("${compiler[@]}" -print-file-name="$library")"; done
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 BF16KIT_TEST_KERNEL="$out/_bf16kernel.so" \
  "${PYTHON:-python3}" -m pytest -q "${operators[@]}"
