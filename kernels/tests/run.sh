#!/usr/bin/env bash
# Builds the kernel's property test into build/kernel-test/ and runs it.
#
#   kernels/tests/run.sh [--sanitize] [--cases 10000] [--seed 1] [--only INDEX]
#
# --sanitize: under AddressSanitizer and UndefinedBehaviorSanitizer. CXX: the compiler, g++ unless set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=build/kernel-test/plain
flags=(-Ikernels -std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Wno-maybe-uninitialized -Wno-psabi -Wno-unknown-warning-option -pthread)
if [[ ${1:-} == --sanitize ]]; then
  shift
  out=build/kernel-test/sanitized
  flags+=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all)
fi
mkdir -p "$out"

read -ra compiler <<<"${CXX:-g++}"
objects=() jobs=()
for source in kernels/isa/*.cpp kernels/gemm/*.cpp kernels/tests/property_test.cpp; do
  object=$out/$(basename "$source" .cpp).o
  objects+=("$object")
  "${compiler[@]}" "${flags[@]}" -c "$source" -o "$object" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
"${compiler[@]}" "${flags[@]}" "${objects[@]}" -o "$out/property_test"
exec "$out/property_test" "$@"
