"""Rebuilds a profile in memory with further nodes in fp32, and measures the effect on one output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import PlanEntry
from bf16kit.drift.measurements import MOST_DB
from bf16kit.numerics.lowbits import is_half
from bf16kit.numerics.rounding import to_bf16, to_fp32
from bf16kit.runtime.ort.externaldata import REBUILT
from converter.graph.initializers import stays_inline
from converter.graph.operators import WEIGHTED
from converter.graph.step import run
from converter.islands.explain import Trace, decibels
from converter.plan import make_plan, narrowed
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES
from converter.rewrite import prepare
from converter.source import Array, Feeds
from converter.verify.emulate import Emulate
from converter.verify.probing import Graph, compare
from converter.verify.spool import Spool
from converter.write.graphs import build

Expired = Callable[[], bool]  # returns whether the time for trials is over


def never() -> bool:
    """Return False: there is no time limit."""
    return False


class RemedyTrials:
    """A profile, rebuilt in memory with further nodes in fp32, and the SQNR of one output.

    Once ``expired`` returns true, an untried set of nodes counts as no improvement. Rounded weights are kept in a file
    in ``scratch``.
    """

    def __init__(
        self,
        trace: Trace,
        artifact: Artifact,
        profile: str,
        feeds: Sequence[Feeds],
        output: ir.Value,
        expired: Expired = never,
        scratch: Path | None = None,
    ) -> None:
        self._trace = trace
        self._artifact = artifact
        self._feeds = feeds
        self._output = output.name or ""
        self._expired = expired
        self._profile = replace(PROFILES[profile], uses_kernel=False)
        halves = {entry.tensor for entry in artifact.manifest.checkpoint if is_half(entry.dtype)}
        self._prepared = prepare(_with_weights(trace.reference), half_precision=halves)
        self._tried: dict[tuple[str, ...], float] = {}
        self._rounded = Spool(scratch)
        self._places: dict[str, int] = {}
        plan = artifact.manifest.plan
        self._islands = Islands(_searched(plan.nodes[profile]), _searched(plan.tensors))
        self.planned_nodes = frozenset(entry.name for entry in plan.nodes[profile])

    def sqnr(self, keep: tuple[str, ...]) -> float:
        """Return the SQNR in dB of the output with the nodes ``keep`` in fp32."""
        if keep not in self._tried:
            if self._expired():
                return -MOST_DB
            powers = compare(self._trace.reference, self._candidate(keep), self._feeds, {self._output})
            self._tried[keep] = decibels(powers[self._output].ratio)
        return self._tried[keep]

    def pruned(self, keep: tuple[str, ...], goal: float) -> tuple[str, ...]:
        """Return ``keep`` without the nodes that ``goal`` dB do not need; products, which cost most, are tried
        first."""
        products = {node.name for node in self._trace.graph if node.op_type in WEIGHTED}
        for name in sorted(keep, key=lambda name: name not in products):
            fewer = tuple(other for other in keep if other != name)
            if fewer and self.sqnr(fewer) >= goal:
                keep = fewer
        return keep

    def _candidate(self, keep: Iterable[str]) -> Graph:
        planned = make_plan(
            self._prepared,
            keep_fp32=[*self._patterns("keep_fp32"), *(f"^{re.escape(name)}$" for name in keep)],
            bf16=self._patterns("bf16"),
            islands=self._islands,
            profiles=[self._profile.name],
        )
        model = build(self._prepared, planned, self._profile)
        narrow = narrowed(planned.plan.tensors)
        weights: dict[str, Array] = {}
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and not stays_inline(tensor):
                weights[name] = self._narrowed(name, tensor) if name in narrow else tensor.numpy()
                value.type = ir.TensorType(ir.DataType.from_numpy(weights[name].dtype))
                value.const_value = _external_tensor(name, weights[name])
        return Graph(run([Emulate()], model), self._artifact.path, weights)

    def _narrowed(self, name: str, tensor: ir.TensorProtocol) -> Array:
        """Return ``tensor`` rounded to bf16 and widened, mapped from a file: no trial holds all weights in memory."""
        if name not in self._places:
            self._places[name] = len(self._rounded)
            self._rounded.append({name: to_fp32(to_bf16(tensor.numpy()))})
        return self._rounded[self._places[name]][name]

    def _patterns(self, option: str) -> list[str]:
        given = self._artifact.manifest.options.get(option)
        return [str(pattern) for pattern in given] if isinstance(given, list) else []


def _searched(entries: Iterable[PlanEntry]) -> dict[str, str]:
    """Return the entries that a search keeps in fp32 already, each with its reason."""
    return {entry.name: entry.reason for entry in entries if entry.code == "budget"}


def _with_weights(reference: Graph) -> ir.Model:
    """Return the reference with its weights, to be prepared as the conversion did."""
    model = reference.model.clone()
    for name, array in reference.external.items():
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    return model


def _external_tensor(name: str, array: Array) -> ir.TensorProtocol:
    dtype, shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
    return ir.ExternalTensor(REBUILT, 0, array.nbytes, dtype, shape=shape, name=name)
