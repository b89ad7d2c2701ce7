#!/usr/bin/env bash
# Builds the kernel's property tests into build/kernel-test/ and runs them. They test products, attention, normalisation,
# convolutions, recurrences, and the AMX path in a model.
#
#   kernels/tests/run.sh [--sanitize] [--cases 10000] [--seed 1] [--only INDEX]
#
# --sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer. CXX: the compiler; the default is g++. For another processor
# than this one (emulated/aarch64.sh): OUT, another directory of build/kernel-test, and RUN, a command that runs a program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=build/kernel-test/${OUT:-plain}
flags=(-Ikernels -std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Wno-maybe-uninitialized -Wno-psabi -Wno-unknown-warning-option -pthread)
if [[ ${1:-} == --sanitize ]]; then
  shift
  out=build/kernel-test/sanitized
  flags+=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all)
fi
mkdir -p "$out"

read -ra compiler <<<"${CXX:-g++}"
objects=() jobs=() tests=(property_test attention_test norm_test conv_test recurrent_test amx_test)
for source in kernels/isa/*.cpp kernels/gemm/*.cpp "${tests[@]/#/kernels/tests/}"; do
  [[ $source == *.cpp ]] || source+=.cpp
  object=$out/$(basename "$source" .cpp).o
  [[ $source == kernels/tests/* ]] || objects+=("$object")
  "${compiler[@]}" "${flags[@]}" -c "$source" -o "$object" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
for test in "${tests[@]}"; do "${compiler[@]}" "${flags[@]}" "$out/$test.o" "${objects[@]}" -o "$out/$test"; done
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
