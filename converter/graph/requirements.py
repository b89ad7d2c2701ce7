"""Determines the oldest ONNX Runtime that a profile needs: it loads its graphs, and has the kernels of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from bf16kit.system.versions import version_key
from converter.graph.cuda_nodes import missing_kernels
from converter.graph.cuda_support import KernelTable, releases
from converter.process import versions

# The newest opset and IR version that each release loads, found by running the release; later releases load no newer
# ones. bf16kit installs with 1.24 and later.
_LOADS = (("1.24", 25, 13), ("1.25", 26, 13))


def required(profile: str, graphs: Sequence[Path], *, on_device: bool = False) -> dict[str, str]:
    """Return the lowest version of each package that runs ``profile``; ``graphs`` are its graph and its reference's.

    That is the oldest release that loads graphs of their opset and IR version. If no known release does, it is the
    installed one, which ran them. cuda also needs kernels: the first release from which on all known ones have a kernel
    for every bf16 node. If the installed release is older and ran the graph ``on_device``, it is that one.
    """
    models = [onnx.load(path, load_external_data=False) for path in graphs]
    opset = max((o.version for m in models for o in m.opset_import if o.domain in ("", "ai.onnx")), default=0)
    ir_version = max((model.ir_version for model in models), default=0)
    installed = versions.onnxruntime()
    oldest_loading = next(
        (release for release, *most in _LOADS if opset <= most[0] and ir_version <= most[1]), installed
    )
    needed = [oldest_loading] if oldest_loading else []
    if profile == "cuda":
        least = oldest_with_kernels(models)
        needed.append(min(least, installed, key=version_key) if on_device and installed else least)
    return {"onnxruntime": max(needed, key=version_key)} if needed else {}


def oldest_with_kernels(models: Sequence[onnx.ModelProto]) -> str:
    """Return the first release from which on all known ones have a CUDA kernel for every bf16 node of ``models``.

    If even the newest lacks one, return the newest: running on a device will show whether it works.
    """
    known = releases()
    least = known[-1]
    for release in reversed(known):
        if any(missing_kernels(model, KernelTable.load(release)) for model in models):
            break
        least = release
    return least
