"""Previews a conversion: the source is read and planned as in a conversion, but nothing is run or written."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bf16kit.artifact.disk import DiskSize
from bf16kit.artifact.manifest import Plan, TensorEntry
from bf16kit.artifact.publish import check_target
from bf16kit.converter.candidate import plan_profiles
from bf16kit.converter.graph.dimensions import with_distinct_dimensions
from bf16kit.converter.graph.initializers import dims
from bf16kit.converter.options import Options
from bf16kit.converter.plan import Planned, narrowed
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.process.quiet import prefix_errors
from bf16kit.converter.read_and_trace import read
from bf16kit.converter.report.figures import PlanGroup, plan_groups
from bf16kit.converter.report.oncpu import OnCpu, shares
from bf16kit.converter.rewrite import Prepared, prepare
from bf16kit.converter.source import Source
from bf16kit.converter.verify.samples import load
from bf16kit.converter.write.weights import BF16_FILE, FP32_FILE
from bf16kit.messages.wording import plain, size, table

VERSION = 1  # of the format that `checkpoint --dry-run --json` writes
_REST, _REST_PER_NODE = 50_000, 3_000  # bytes of graphs, report and golden samples, seen on small and large models
_TIMES = ((100e6, "a minute or less"), (1e9, "minutes"), (math.inf, "tens of minutes"))  # by bytes of the checkpoint


@dataclass(frozen=True, slots=True)
class Preview:
    """What a conversion would write. ``disk`` is an estimate; ``reading`` are the seconds that reading took."""

    name: str
    profiles: tuple[str, ...]
    optional: tuple[str, ...]
    disk: DiskSize
    plan: tuple[PlanGroup, ...]
    on_cpu: OnCpu | None
    notes: tuple[str, ...]
    reading: float

    @property
    def time(self) -> str:
        """A rough class of the time that a conversion takes."""
        rest = next(words for bytes_, words in _TIMES if self.disk.checkpoint <= bytes_)
        return f"reading took {self.reading:.0f} s; writing and running it take {rest}, by its size and the samples"

    def __str__(self) -> str:
        ratio = f"{self.disk.total_ratio:.2f} × the checkpoint"
        parts = ", ".join(f"{name} {size(count)}" for name, count in self.disk.parts.items())
        profiles = [f"{each} if within budget" if each in self.optional else each for each in self.profiles]
        lines = [
            f"{self.name}: dry run, nothing was written; about {size(self.disk.total)} on disk, {ratio}",
            f"disk        {parts} (estimated)",
            *([f"on a CPU    {self.on_cpu}"] if self.on_cpu is not None else []),
            *([f"profiles    {', '.join(profiles)}"] if profiles else []),
            f"time        {self.time}",
            *(f"note: {note}" for note in self.notes),
        ]
        rows = [(group.of, group.precision, group.summary, group.count) for group in self.plan]
        tables = [f"\n{table('Precision plan', ('of', 'precision', 'reason', 'count'), rows)}"] if rows else []
        return "\n".join([*lines, *tables])

    def record(self) -> dict[str, Any]:
        """Return the preview for programs, see docs/json.md."""
        fields = ("profiles", "optional", "plan", "on_cpu", "notes", "time")
        disk = {"total_bytes": self.disk.total, "checkpoint_bytes": self.disk.checkpoint, "parts": self.disk.parts}
        head = {"version": VERSION, "published": False, "error": "", "dry_run": True, "name": self.name}
        return dict(plain(head | disk | {name: getattr(self, name) for name in fields}))


def preview(options: Options, progress: Progress) -> Preview:
    """Read and plan ``options.source``; raises what a conversion raises up to there."""
    check_target(options.target.path, options.force)
    began = time.monotonic()
    with prefix_errors(options.source):
        source = read(options, progress)
        reading = time.monotonic() - began
        if options.samples is not None:  # whether names of dimensions are right, only a run could tell
            names = [output.name for output in source.outputs]
            load(options.samples, with_distinct_dimensions(source.inputs), outputs=names)
        plan, tensors, disk = Plan(), list[TensorEntry](), _without_graph(options, source)
        if source.graph is not None:
            with progress.step("planning"):
                prepared = prepare(source.graph, source.checkpoint.tensors, orders=source.checkpoint.orders)
                planned = plan_profiles(prepared, options)
            plan, tensors = planned.plan, _tensors(prepared, planned)
            disk = _disk(options, source, prepared, planned, tensors)
    return Preview(
        name=f"{options.target.model}/{options.target.version}",
        profiles=(*plan.nodes, *options.traced(has_graph=source.graph is not None)),
        optional=options.optional_profiles,
        disk=disk,
        plan=tuple(plan_groups(plan)),
        on_cpu=shares(plan, tensors) if {"cpu", "cpu-bf16"} & plan.nodes.keys() else None,
        notes=tuple(source.notes),
        reading=reading,
    )


def _tensors(prepared: Prepared, planned: Planned) -> list[TensorEntry]:
    """Return the tensors that profiles read, as they would be stored."""
    narrow, found = narrowed(planned.plan.tensors), []
    read_by_profiles = {entry.name for entry in planned.plan.tensors}
    for name, value in prepared.base.graph.initializers.items():
        if value.const_value is not None and name in read_by_profiles:
            shape = dims(value.const_value)
            dtype, width, file = ("bfloat16", 2, BF16_FILE) if name in narrow else ("float32", 4, FP32_FILE)
            panels = planned.fusions.panels.get(name)
            entry = {"name": name, "dtype": dtype, "shape": list(shape), "file": file, "offset": 0}
            found.append(TensorEntry.model_validate(entry | {"bytes": width * math.prod(shape), "panels": panels}))
    return found


def _disk(
    options: Options, source: Source, prepared: Prepared, planned: Planned, tensors: Sequence[TensorEntry]
) -> DiskSize:
    checkpoint, weights = source.checkpoint, sum(tensor.bytes for tensor in tensors)
    unused = sum(array.nbytes for name, array in checkpoint.tensors.items() if name not in prepared.matches)
    narrow = sum(tensor.bytes for tensor in tensors if tensor.dtype == "bfloat16")
    copies = len(options.traced(has_graph=True)) + bool(options.export and not options.stores_export)
    rest = _REST + _REST_PER_NODE * max((len(nodes) for nodes in planned.plan.nodes.values()), default=0)
    return DiskSize(checkpoint.nbytes, weights, (narrow + unused) * options.residual, copies * weights, rest)


def _without_graph(options: Options, source: Source) -> DiskSize:
    half = source.checkpoint.nbytes // 2
    traced = len(options.traced(has_graph=False))
    return DiskSize(source.checkpoint.nbytes, 0, half * options.residual, traced * half, _REST)
