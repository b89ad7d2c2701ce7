"""Compares the model's outputs with the outputs that came with the samples, which the source's own framework computed.

They show what no other check can: that each weight is in its place, and that the architecture is the one it was trained
in. Both sides compute in fp32, so the bound is the same as for the oracle: fp32 noise.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from converter.verify.oracle import OracleRun, measure
from converter.verify.samples import Samples


def check(samples: Samples, oracle_run: OracleRun) -> str | None:
    """Return how the source's outputs in ``oracle_run`` differ from those that came with ``samples``, as a sentence.

    Returns None if they agree.
    """
    if not oracle_run.outputs:
        return f"the model could not be run: {oracle_run.how}"
    count = len(oracle_run.outputs)
    expected = list(samples.expected[:count])
    names = [name for name in oracle_run.outputs[0] if all(name in feed for feed in expected)]
    if not names:
        return "the samples do not hold outputs for every input"
    own = [{name: np.asarray(outputs[name]) for name in names} for outputs in oracle_run.outputs]
    wanted = replace(oracle_run, outputs=[{name: feed[name] for name in names} for feed in expected], how="the samples")
    found = measure(wanted, own)
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
