"""Run by the release that is asked: prints its version and the kernels of its CUDA provider as JSON."""

from __future__ import annotations

import json

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state


def kernels() -> list[tuple[str, str, int, int, dict[str, list[str]]]]:
    """Domain, operator, first and last version, and the types that each constraint takes."""
    found = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == "CUDAExecutionProvider":
            types = {name: sorted(taken) for name, taken in kernel.type_constraints.items()}
            row = (kernel.domain, kernel.op_name, *kernel.version_range, types)
            found[json.dumps(row, sort_keys=True)] = row
    return [found[key] for key in sorted(found)]


if __name__ == "__main__":
    print(json.dumps([onnxruntime.__version__, kernels()]))
