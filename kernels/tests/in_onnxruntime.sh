#!/usr/bin/env bash
# Builds the whole library with AddressSanitizer and UndefinedBehaviorSanitizer into build/kernel-test/library/, and runs the
# tests that load it into ONNX Runtime. PYTHON: an interpreter that has the project and pytest. CXX: GCC; the default is g++.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=build/kernel-test/library
mkdir -p "$out"
read -ra compiler <<<"${CXX:-g++}"
flags=(-Ikernels -std=c++17 -O1 -g -fPIC -fvisibility=hidden -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all)
flags+=(-Wno-psabi -Wno-maybe-uninitialized)
objects=() jobs=()
for source in kernels/{ort,gemm,isa,rounding}/*.cpp; do
  objects+=("$out/$(basename "$source" .cpp).o")
  "${compiler[@]}" "${flags[@]}" -c "$source" -o "${objects[-1]}" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
"${compiler[@]}" -shared -fsanitize=address,undefined "${objects[@]}" -o "$out/_bf16kernel.so"

# The interpreter is not built with the sanitizers, so they must be preloaded. Leaks are not checked, because the interpreter and
# ONNX Runtime leak themselves.
preload=""
for library in libasan.so libubsan.so libstdc++.so.6; do preload+=" $("${compiler[@]}" -print-file-name="$library")"; done
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 BF16KIT_TEST_KERNEL="$PWD/$out/_bf16kernel.so" \
  "${PYTHON:-python3}" -m pytest -q tests/kit/runtime/test_kernel_graphs.py tests/kit/runtime/test_kernel_refusals.py \
  tests/kit/runtime/test_attention.py tests/kit/runtime/test_norm.py tests/kit/runtime/test_conv.py \
  tests/kit/runtime/test_recurrent.py tests/converter/fuse/test_panels.py tests/converter/fuse/test_join.py \
  tests/converter/fuse/test_convolve.py
