#!/usr/bin/env bash
# Runs the operators' tests in every minor release of ONNX Runtime that the kernel supports, from the version of its table
# (kVersion in kernels/ort/abi.h) to the version in constraints.txt. Prints the result for each.
#
#   kernels/tests/versions.sh [VERSION…]
#
# PYTHON: an interpreter that has the built project, pytest and pip. Each release is installed into
# build/kernel-test/onnxruntime/ (60 MB each); the interpreter's own packages are not changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
versions=("$@")
# The last patch of each minor release. tests/kit/runtime/test_kernel.py checks the first and the last of them.
((${#versions[@]})) || versions=(1.21.1 1.22.1 1.23.2 1.24.4 1.25.1 1.26.0 1.27.0 1.28.0 1.29.0 1.30.0 1.31.1)
. kernels/tests/operators.sh

failed=()
for version in "${versions[@]}"; do
  site=build/kernel-test/onnxruntime/$version
  if [[ ! -e $site/.installed ]]; then
    rm -rf "$site"
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --target "$site" "onnxruntime==$version"
    touch "$site/.installed"
  fi
  export PYTHONPATH=$PWD/$site:$PWD
  found=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)')
  [[ $found == "$version" ]] || { echo "versions: onnxruntime $version is installed in $site, but $found was imported" >&2; exit 1; }
  log=build/kernel-test/onnxruntime/$version.log
  if "$python" -m pytest -q -p no:cacheprovider "${operators[@]}" >"$log" 2>&1; then
    echo "onnxruntime $version: $(tail -1 "$log")"
  else
    echo "onnxruntime $version: FAILED, see $log"
    failed+=("$version")
  fi
done
((${#failed[@]} == 0)) || { echo "versions: the kernel's tests fail with onnxruntime ${failed[*]}" >&2; exit 1; }
