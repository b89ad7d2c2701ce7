"""The least ONNX Runtime that a profile needs: one that loads its graphs, and has the kernels it was planned with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from bf16kit.versions import order
from converter.graph.cuda_nodes import lacking
from converter.graph.cuda_support import KernelTable, releases
from converter.process import versions

# The newest opset and IR version that each release loads, asked of the release itself; those after it load no other.
# bf16kit installs with 1.24 and later.
_LOADS = (("1.24", 25, 13), ("1.25", 26, 13))


def required(profile: str, graphs: Sequence[Path], *, on_device: bool = False) -> dict[str, str]:
    """The least version of each package that runs ``profile``, whose graphs, and its reference's, are ``graphs``.

    That is the oldest release that loads graphs of their opset and IR version. What none of those known loads needs the
    installed release, which ran it. cuda relies on kernels, too: it needs the first release from which on all that were
    asked have a kernel for every node of its graph that is bf16, or the installed one where this is older and ran it,
    ``on_device``.
    """
    models = [onnx.load(path, load_external_data=False) for path in graphs]
    opset = max((o.version for m in models for o in m.opset_import if o.domain in ("", "ai.onnx")), default=0)
    ir_version = max((model.ir_version for model in models), default=0)
    installed = versions.onnxruntime()
    loads = next((release for release, *most in _LOADS if opset <= most[0] and ir_version <= most[1]), installed)
    needed = [loads] if loads else []
    if profile == "cuda":
        least = with_kernels(models)
        needed.append(min(least, installed, key=order) if on_device and installed else least)
    return {"onnxruntime": max(needed, key=order)} if needed else {}


def with_kernels(models: Sequence[onnx.ModelProto]) -> str:
    """The first release from which on all that were asked have a CUDA kernel for every bf16 node of ``models``.

    Where even the newest lacks one, it is the newest: a device will say what it makes of it.
    """
    known = releases()
    least = known[-1]
    for release in reversed(known):
        if any(lacking(model, KernelTable.load(release)) for model in models):
            break
        least = release
    return least
