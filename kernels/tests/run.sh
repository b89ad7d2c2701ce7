#!/usr/bin/env bash
# Builds the kernel's property tests into build/kernel-test/ and runs them. They test products, attention, normalisation,
# convolutions, recurrences, and the AMX path in a model.
#
#   kernels/tests/run.sh [--sanitize] [--cases 10000] [--seed 1] [--only INDEX]
#
# --sanitize: the kernel with AddressSanitizer and UndefinedBehaviorSanitizer, but not the tests' own arithmetic in float64, which
# would take four times as long. Their arrays are checked all the same, because the sanitizer replaces malloc.
# CXX: the compiler; the default is g++. For another processor than this one (emulated/aarch64.sh): OUT, another directory of
# build/kernel-test, and RUN, a command that runs a program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=build/kernel-test/${OUT:-plain}
flags=(-Ikernels -std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Wno-maybe-uninitialized -Wno-psabi -Wno-unknown-warning-option -pthread)
checked=() # flags for the kernel's code
if [[ ${1:-} == --sanitize ]]; then
  shift
  out=build/kernel-test/sanitized
  checked=(-O1 -g1 -fPIC -fvisibility=hidden -fsanitize=address,undefined -fno-sanitize-recover=all)
fi
mkdir -p "$out"

read -ra compiler <<<"${CXX:-g++}"
objects=() jobs=() tests=(property_test attention_test norm_test conv_test recurrent_test amx_test)
for source in kernels/isa/*.cpp kernels/gemm/*.cpp "${tests[@]/#/kernels/tests/}"; do
  [[ $source == *.cpp ]] || source+=.cpp
  object=$out/$(basename "$source" .cpp).o
  own=("${checked[@]}")
  [[ $source == kernels/tests/* ]] && [[ $source != */amx_test.cpp ]] && own=() # amx_test.cpp includes code of the kernel
  [[ $source == kernels/tests/* ]] || objects+=("$object")
  "${compiler[@]}" "${flags[@]}" "${own[@]}" -c "$source" -o "$object" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
# The kernel's objects come first: of an inline function that both have, the linker takes the one with checks.
for test in "${tests[@]}"; do "${compiler[@]}" "${flags[@]}" "${checked[@]}" "${objects[@]}" "$out/$test.o" -o "$out/$test"; done
# All tests run at the same time, because they take minutes with sanitizers. Their outputs are printed in this order.
runs=() status=0
for test in "${tests[@]}"; do
  ${RUN:-} "$out/$test" "$@" >"$out/$test.log" 2>&1 &
  runs+=($!)
done
for i in "${!runs[@]}"; do
  wait "${runs[i]}" || status=$?
  cat "$out/${tests[i]}.log"
done
exit "$status"
