"""Whether a breach shows in the requests of more than one client, where several are measured.

The answer to a breach concerns all clients. A single one can send inputs whose drift is far over the budget, with
values that nearly overflow or cancel out, and the model of all others is sound. A client that sends over nine
tenths of the rows counts by itself: a few requests of others, as of a prober, say nothing about what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bf16kit.drift.metrics import Budget
from service.drift.recent import Estimate, Window, estimates

_TRIED = 4  # clients, those with the most drift; a breach that one of the others causes alone does not exist
_MOST_ROWS = 0.9  # share of the rows above which a client counts by itself
_MOST = 1e6  # relative_l2 that a row counts at most: an infinite one would make all clients with one equal


def corroborated(window: Window, budget: Budget, found: Sequence[Estimate]) -> list[Estimate]:
    """Return ``found``, where a breach that one client alone causes has 1 as its lower ends: it is undecided.

    It is that client's alone if others sent a tenth of the rows at least, and the estimate for these is within the
    budget. Bounds of which the window has no rows, those on slices, are left as they are.
    """
    judged = list(found)
    if not any(each.low > 1 for each in judged):
        return judged
    clients, at = np.unique(window.clients, return_inverse=True)
    if len(clients) == 1:
        return judged
    drift = np.bincount(at, window.weights * np.minimum(window["relative_l2"], _MOST))
    share = np.bincount(at, window.weights) / window.weights.sum()
    for client in np.argsort(drift)[::-1][:_TRIED]:
        if share[client] > _MOST_ROWS:
            continue
        others = {each.metric: each.ratio for each in estimates(window.select(at != client), budget)}
        judged = [
            replace(each, low=min(each.low, 1.0), lowest=min(each.lowest, 1.0))
            if others.get(each.metric, math.inf) <= 1
            else each
            for each in judged
        ]
    return judged
