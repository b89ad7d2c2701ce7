"""Compares the model's outputs with the outputs that came with the samples, which the source's own framework computed.

They show what no other check can: that each weight is in its place, and that the architecture is the one it was trained
in. Both sides compute in fp32, so the bound is the same as for the oracle: fp32 noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converter.model import Source
from converter.proof.nudge import nudge
from converter.proof.oracle import OracleRun, measure
from converter.proof.running import open_fp32_graph
from converter.proof.samples import Samples

if TYPE_CHECKING:
    from bf16kit.runtime.onnx import OnnxRuntime


def check(source: Source, samples: Samples, oracle_run: OracleRun, scratch: Path) -> str | None:
    """Return how the outputs of ``source`` differ from the expected ones, as a sentence; None if they agree.

    ``oracle_run`` holds the source's outputs; ``samples`` holds the expected outputs that came with them.
    """
    if not oracle_run.outputs:
        return f"the model could not be run: {oracle_run.how}"
    count = len(oracle_run.outputs)
    expected = list(samples.expected[:count])
    names = [name for name in oracle_run.outputs[0] if all(name in feed for feed in expected)]
    if not names:
        return "the samples do not hold outputs for every input"
    own = [{name: np.asarray(outputs[name]) for name in names} for outputs in oracle_run.outputs]

    graph = source.graph

    def nudged(random: np.random.Generator) -> OnnxRuntime:
        assert graph is not None  # noqa: S101 - not asked without one
        return open_fp32_graph(
            graph,
            source.inputs,
            source.outputs,
            scratch,
            lambda _name, tensor: nudge(tensor.numpy(), random, oracle_run.roundoff),
        )

    wanted = OracleRun([{name: feed[name] for name in names} for feed in expected], "the samples", oracle_run.roundoff)
    found = measure(wanted, samples.feeds, own, None if graph is None else nudged, scratch)
    wrong = [(name, figure) for name, figure in found.outputs.items() if not figure.relative_l2 <= figure.bound]
    return (
        None
        if not wrong
        else "; ".join(
            f"output {name!r} is {figure.relative_l2:.3g} (relative_l2) from the expected one, and fp32 noise explains"
            f" at most {figure.bound:.3g}"
            for name, figure in wrong
        )
    )
