"""Finds the layer at which a profile leaves the expected line, and the nodes to keep in fp32 to mend its output.

The layer is found by following the noise of an output upstream. The nodes are found by trials, each with the profile
rebuilt in memory. First comes the node that left the line, with the nodes before it whose rounding it amplifies, level
by level. If that is not enough, the nodes on the path follow one by one. Nodes that turn out not to be needed are
removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from pathlib import Path

import onnx_ir as ir

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.budget import Budget
from bf16kit.drift.measurements import MARGIN_DB, RemedyEntry
from converter.graph.operators import EXACT, WEIGHTED
from converter.islands.explain import Trace
from converter.islands.remedytrials import Expired, RemedyTrials, never
from converter.source import Feeds
from converter.verify.expectation import operands

_MAX_LEVELS = 5  # levels of rounding nodes before a node that are tried
_MAX_SINGLES = 12  # nodes on the path that are tried one by one
_MAX_NODES = 24  # nodes that a remedy may name, at most
_MIN_GAIN = 1.0  # dB that one more node must gain
_MIN_TOTAL_GAIN = 3.0  # dB that a remedy must gain


@dataclass(frozen=True, slots=True)
class NoisyOutput:
    """An output with more noise than expected or allowed, the path its noise takes, and the SQNR in dB to reach.

    ``path`` holds values, from the output upstream. Each is the one farthest below the line among the inputs of the
    value before it. ``node`` is where the path left the line, or None if it never did. ``readers`` are the nodes that
    compute the next value of the path from it.
    """

    output: ir.Value
    path: tuple[ir.Value, ...]
    goal: float
    node: ir.Node | None = None
    readers: tuple[ir.Node, ...] = ()


def find_noisy_output(trace: Trace, budget: Budget) -> NoisyOutput | None:
    """Return the departure of the worst output that is off the line or exceeds ``budget`` in relative_l2, else None."""
    bound = budget.bounds.get("relative_l2", math.inf)
    allowed = -20 * math.log10(bound) if 0 < bound < math.inf else -math.inf
    found = []
    for output in (value for value in trace.graph.outputs if value.producer() is not None):  # no input passed through
        goal = max(trace.expected_sqnr(output) - MARGIN_DB, allowed)
        if trace.has(output) and trace.sqnr(output) < goal:
            path = _path(trace, output)
            found.append(NoisyOutput(output, path, goal, *_noise_source(trace, path)))
    return max(found, key=lambda each: each.goal - trace.sqnr(each.output), default=None)


def find_remedy(
    trace: Trace,
    artifact: Artifact,
    profile: str,
    feeds: Sequence[Feeds],
    noisy: NoisyOutput,
    expired: Expired = never,
    scratch: Path | None = None,
) -> RemedyEntry | None:
    """Return the smallest set found of nodes that, kept in fp32, bring the output to its goal, or nearest to it.

    Once ``expired`` returns true, nothing more is tried. Temporary files go to ``scratch``. Returns None if the best
    set gains less than 3 dB. Raises what :func:`converter.rewrite.prepare` and running a graph raise.
    """
    if noisy.node is None:
        return None
    trials = RemedyTrials(trace, artifact, profile, feeds, noisy.output, expired, scratch)
    before = trace.sqnr(noisy.output)
    before_it = _levels(trace, [noisy.node], trials.planned_nodes)
    around_it = _levels(trace, [noisy.node, *noisy.readers], trials.planned_nodes)  # a bf16 reader rounds what it reads
    best = _first_reaching(trials, chain(before_it, around_it), noisy.goal)
    if trials.sqnr(best) < noisy.goal:
        best = _extended(trials, best, _rounding_on_path(trace, noisy.path, trials.planned_nodes), noisy.goal)
    reached = trials.sqnr(best)
    if reached < before + _MIN_TOTAL_GAIN:
        return None
    best = trials.pruned(best, min(noisy.goal, reached - _MIN_GAIN / 2))
    return RemedyEntry(
        keep_fp32=pattern(best),
        nodes=list(best),
        output=noisy.output.name or "",
        before_db=before,
        after_db=trials.sqnr(best),
    )


def pattern(names: Sequence[str]) -> str:
    """Return ``names`` as one regular expression for ``--keep-fp32``."""
    one_of = "|".join(re.escape(name) for name in names)
    return f"^{one_of}$" if len(names) == 1 else f"^({one_of})$"


def _first_reaching(trials: RemedyTrials, sets: Iterable[tuple[str, ...]], goal: float) -> tuple[str, ...]:
    """Return the first of ``sets`` that reaches ``goal``, else the one that comes nearest."""
    best: tuple[str, ...] = ()
    for nodes in sets:
        if trials.sqnr(nodes) > trials.sqnr(best) + _MIN_GAIN:
            best = nodes
        if trials.sqnr(best) >= goal:
            break
    return best


def _extended(trials: RemedyTrials, chosen: tuple[str, ...], names: Iterable[str], goal: float) -> tuple[str, ...]:
    """Return ``chosen`` extended by the ``names`` that gain most, one after the other, until ``goal`` is reached."""
    order = sorted(names, key=lambda name: trials.sqnr((*chosen, name)), reverse=True)
    for name in order:
        if trials.sqnr(chosen) >= goal:
            break
        if name not in chosen and trials.sqnr((*chosen, name)) > trials.sqnr(chosen) + _MIN_GAIN:
            chosen = (*chosen, name)
    return chosen


def _path(trace: Trace, output: ir.Value) -> tuple[ir.Value, ...]:
    path = [output]
    while sources := _nearest_sources(trace, path[-1])[1]:
        path.append(max(sources, key=lambda source: _shortfall(trace, source)))
    return tuple(path)


def _noise_source(trace: Trace, path: Sequence[ir.Value]) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """Return the node where the last stretch below the line before the output begins, and the nodes that read it.

    If several nodes were fused into one, the product is returned. A stretch lasts as long as values are below the line
    by half the margin, so that one value near the edge does not split it.
    """
    below = [_shortfall(trace, value) for value in path]
    begin = next((index for index, shortfall in enumerate(below) if shortfall > MARGIN_DB), None)
    if begin is None:
        return None, ()
    stretch = takewhile(lambda index: below[index] > MARGIN_DB / 2, range(begin, len(path)))
    first = max(index for index in stretch if below[index] > MARGIN_DB)
    nodes, _ = _nearest_sources(trace, path[first])
    readers = _nearest_sources(trace, path[first - 1])[0] if first else ()
    return next((node for node in nodes if node.op_type in WEIGHTED), nodes[0]), tuple(readers)


def _rounding_on_path(trace: Trace, path: Sequence[ir.Value], known: Collection[str]) -> list[str]:
    """Return a few rounding nodes that compute the values of ``path``, in order of how far their results fall."""
    added: dict[str, float] = {}
    for value, source in pairwise(path):
        for node in _nearest_sources(trace, value)[0]:
            if (name := node.name or "") in known and _rounds(trace, node):
                added[name] = _shortfall(trace, value) - _shortfall(trace, source)
    return sorted(added, key=lambda name: -added[name])[:_MAX_SINGLES]


def _shortfall(trace: Trace, value: ir.Value) -> float:
    """Return the dB below the line; 0 for a value that only the reference has."""
    return trace.expected_sqnr(value) - trace.sqnr(value) if trace.has(value) else 0.0


def _nearest_sources(trace: Trace, value: ir.Value) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes that compute ``value``, and the nearest values they read that both graphs have."""
    nodes: list[ir.Node] = []
    sources: list[ir.Value] = []
    waiting = [value]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in nodes:
            continue
        nodes.append(node)
        for operand in operands(node):
            (sources if trace.has(operand) else waiting).append(operand)
    return nodes, sources


def _levels(trace: Trace, nodes: Sequence[ir.Node], known: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield growing sets of names: ``nodes``, then with the nearest rounding nodes before them, and so on."""
    chosen: dict[ir.Node, None] = dict.fromkeys(nodes)
    edge = list(nodes)
    for _ in range(_MAX_LEVELS):
        names = tuple(name for n in chosen if (name := n.name or "") in known and _rounds(trace, n))
        if len(names) > _MAX_NODES:
            return
        if names:
            yield names
        edge = list(dict.fromkeys(found for n in edge for found in _rounding_before(trace, n, chosen)))
        if not edge:
            return


def _rounding_before(trace: Trace, node: ir.Node, seen: dict[ir.Node, None]) -> Iterator[ir.Node]:
    """Yield the nearest nodes upstream of ``node`` that add noise; nodes passed on the way are added to ``seen``."""
    waiting = [node]
    while waiting:
        for value in operands(waiting.pop()):
            producer = value.producer()
            if producer is None or producer in seen:
                continue
            seen[producer] = None
            if _rounds(trace, producer) and producer.op_type not in EXACT:
                yield producer
            else:
                waiting.append(producer)


def _rounds(trace: Trace, node: ir.Node) -> bool:
    rounded = trace.rounded
    return node.name in rounded.nodes or any(v is not None and v.name in rounded.tensors for v in node.inputs)
