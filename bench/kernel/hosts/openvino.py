"""OpenVINO; ``options`` are its properties. Without any it chooses the precision of arithmetic too."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bench.kernel.hosts import Absent, Feeds, Prepare, Run, Subject

_PRECISION = "INFERENCE_PRECISION_HINT"


def open_side(options: Mapping[str, str], subject: Subject) -> Prepare:
    """At its defaults it is given the fp32 graph, tuned the one whose weights are stored in bf16."""
    if find_spec("openvino") is None:
        raise Absent("OpenVINO is not installed: pip install '.[bench]'")
    core = import_module("openvino").Core()  # by name: it has no types
    if "f32" not in options.values() and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise Absent("OpenVINO finds no bf16 instructions here")
    graph = subject.stored if "PERFORMANCE_HINT" in options else subject.graph
    compiled = core.compile_model(str(graph), "CPU", dict(options))
    requested, chosen = options.get(_PRECISION, "bf16"), compiled.get_property(_PRECISION).to_string()
    if chosen != requested:
        raise Absent(f"OpenVINO computes in {chosen} here")
    request: Any = compiled.create_infer_request()

    def prepare(feeds: Feeds, _: float) -> Run:
        given = dict(feeds)
        return lambda: request.infer(given, share_inputs=True, share_outputs=True)

    return prepare
