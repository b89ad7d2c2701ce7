"""One model's drift on the status page: its size and certainty, its cause, and the action taken."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

from bf16kit.drift.metrics import OF_VECTORS, Budget
from service.contract import GATE_FAILED
from service.http import formatting
from service.http.markup import code, fact, grouped_table, meter
from service.http.views import ModelView, RuntimeView
from service.telemetry.history import RecentActivity
from service.telemetry.livedrift import LiveDrift

MOST_OUTPUTS = 20  # rows of the table of drift, and names of tensors
_CAUSES = {
    "rounding": "rounding: drift of a size that bf16 rounding explains",
    "broken": "broken: more drift than rounding explains. Weights, memory, kernel or artifact are damaged or wrong",
    "out_of_range": "out of range: inputs outside the calibrated range",
}


def problems(model: ModelView) -> list[str]:
    """Describe what an operator should look at, the worst first; empty for a healthy model."""
    if model.recent is None:
        return []
    drift, problems_found = model.recent.drift, []
    if drift.over:
        problems_found.append(f"drift is {formatting.share(model.drift_ratio)} of its budget")
    if drift.cause == "broken":
        problems_found.append("is broken: it differs from fp32 by more than rounding explains")
    if drift.gate_passed is False:
        problems_found.append("failed its last golden gate")
    if drift.fallback:
        problems_found.append("answers in fp32, because bf16 went over its budget")
    if model.reference_off:
        problems_found.append(f"drift is not measured: {model.reference_off}")
    elif drift.reference_up is False and not _loads_first(model.recent):
        problems_found.append("drift is not measured: its fp32 reference is loading again, or cannot be loaded")
    return problems_found


def _loads_first(recent: RecentActivity) -> bool:
    """Return whether the fp32 reference is down only because it is being loaded for the first time."""
    return recent.drift.last_sample is None and not recent.total.samples.get("failed")


def drift_part(recent: RecentActivity, running: RuntimeView, now: float, off: str = "") -> str:
    """Return the heading, the table and the facts as HTML.

    ``now`` is in Unix seconds. ``off`` is why the reference stays off.
    """
    return (
        f'<h3>Drift <span class="state {_KINDS[_state(recent)]}">{_state(recent)}</span></h3>\n'
        f'<div class="pair left">\n<div>\n{_table(recent, running)}\n</div>\n'
        f"<div>\n{_facts(recent, running, now, off)}\n</div>\n</div>"
    )


_KINDS = {"over budget": "unavailable", "within budget": "ready", "not known yet": "loading", "not measured": "loading"}


def _state(recent: RecentActivity) -> str:
    """Return the state: over or within the budget, or neither is established."""
    if recent.drift.over:
        return "over budget"
    if not recent.ratios:
        return "not measured"
    return "within budget" if recent.drift.within else "not known yet"


def _table(recent: RecentActivity, running: RuntimeView) -> str:
    if not recent.ratios:
        return f'<p class="muted">No sample was measured yet. {_budget(running)}</p>'
    shown = list(recent.ratios)[:MOST_OUTPUTS]
    budget = Budget.from_dict(running.budget)
    groups = {
        _heading(output, recent, budget): [
            _bound(recent, output, metric, ratio, budget) for metric, ratio in recent.ratios[output].items()
        ]
        for output in shown
    }
    columns = ("metric", "used", "95 % interval", "recent", "budget", "baseline")
    more = len(recent.ratios) - len(shown)
    left = f'<p class="muted">{formatting.plural(more, "more output")} in /status.json.</p>' if more else ""
    return grouped_table("The newest samples against the fp32 reference", columns, groups, wide=3) + left


def _heading(output: str, recent: RecentActivity, budget: Budget) -> str:
    """Return an output's name, effective samples and the state of its change detector."""
    drift, metrics, parts = recent.drift, recent.ratios[output], []
    vectors = {metric for metric in OF_VECTORS if budget.bound(metric) is not None}
    if "slice_error" in metrics and vectors and not vectors & metrics.keys():
        parts.append("one number per row, which slice_error judges")
    if (effective := drift.effective_samples.get(output)) is not None:
        parts.append(f"{formatting.number(effective)} effective samples")
    if output in drift.change_score:
        score = drift.change_score[output]
        alarm = score is None or score >= 1
        text = f"change detector at {formatting.share(score)} of its threshold"
        parts.append(f'<span class="over">{text}: changed</span>' if alarm else text)
    return ", ".join([code(output), *parts])


def _bound(recent: RecentActivity, output: str, metric: str, ratio: float, budget: Budget) -> tuple[str, ...]:
    low, high = (side.get(output, {}).get(metric) for side in (recent.drift.low, recent.drift.high))
    over = low is not None and low > 1
    percentage = f'<span class="share{" over" if over else ""}">{formatting.share(ratio)}</span>'
    name = escape(metric)
    if metric == "slice_error" and output in recent.drift.worst_slice:
        axis, index = recent.drift.worst_slice[output]
        name += f'<br><span class="muted">index {index} of axis {axis}</span>'
    return (
        name,
        f"{meter(ratio)} {percentage}",
        _interval(low, high),
        formatting.number(budget.measured(metric, ratio)),
        formatting.number(budget.bound(metric)),
        formatting.number(recent.baseline.get(output, {}).get(metric)),
    )


def _interval(low: float | None, high: float | None) -> str:
    if high is None:
        return "not known" if not low else f"over {formatting.share(low)}"
    return f'<span class="range">{formatting.share(low)} to {formatting.share(high)}</span>'


def _budget(running: RuntimeView) -> str:
    listed = ", ".join(f"{name} {formatting.number(bound)}" for name, bound in running.budget.items())
    return f"The budget: {escape(listed)}." if listed else "There is no budget."


# --- causes and actions -----------------------------------------------------------------------------------------------


def _facts(recent: RecentActivity, running: RuntimeView, now: float, off: str) -> str:
    drift = recent.drift
    facts = [
        fact(
            "Cause", _marked(_CAUSES.get(drift.cause, drift.cause), drift.cause == "broken") if drift.cause else "none"
        ),
        fact("Changes", f"{drift.changes:,} since it was loaded" if drift.changes else "none since it was loaded"),
        fact("Answers in", _answers(drift, running, now)),
        fact("Golden gate", _gate(drift, running, now)),
        fact("Reference", _reference(recent, now, off)),
    ]
    if drift.out_of_range:
        rows = [
            f"{code(name)}: {formatting.plural(count, 'measured row')}" for name, count in drift.out_of_range.items()
        ]
        facts.insert(1, fact("Out of range", "<br>".join(rows[:MOST_OUTPUTS])))
    return "\n".join(['<dl class="facts">', *facts, "</dl>"])


def _marked(text: str, bad: bool) -> str:
    return f'<span class="over">{escape(text)}</span>' if bad else escape(text)


def _answers(drift: LiveDrift, running: RuntimeView, now: float) -> str:
    """Return the precision that answers, since when, and the reason if it is not bf16 or should not be."""
    text = _marked("fp32" if drift.fallback else "bf16", drift.fallback)
    if drift.fallback_since is not None:
        text += f" since {_moment(drift.fallback_since, now)}"
    if running.active_precision_reason:
        text += f": {escape(running.active_precision_reason)}"
    if drift.fallbacks:
        text += (
            f'<br><span class="muted">fell back {formatting.plural(drift.fallbacks, "time")} since it was loaded</span>'
        )
    return text


def golden(running: RuntimeView) -> str:
    """Return the result of the last golden gate."""
    return f"<span{' class=over' if running.golden.startswith(GATE_FAILED) else ''}>{escape(running.golden)}</span>"


def _gate(drift: LiveDrift, running: RuntimeView, now: float) -> str:
    if drift.gate_passed is None or drift.gate_at is None:
        return golden(running)
    result = "passed" if drift.gate_passed else _marked("failed", bad=True)
    return f"{result} at {_moment(drift.gate_at, now)}<br>{golden(running)}"


def _reference(recent: RecentActivity, now: float, off: str) -> str:
    drift = recent.drift
    down = "loading again, or cannot be loaded: drift is not measured"
    states = {
        None: "not loaded: no sample was taken yet, or shadow is off",
        True: "up",
        False: "loading" if not off and _loads_first(recent) else _marked(off or down, bad=True),
    }
    last = "" if drift.last_sample is None else f"; last sample {_moment(drift.last_sample, now)}"
    return states[drift.reference_up] + last


def _moment(at: float, now: float) -> str:
    """Format a time of day, with the date if it is not today's, and how long ago it was."""
    moment, today = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now, UTC).date()
    text = moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M:%S")
    stamp = moment.isoformat(timespec="seconds")
    return f'<time datetime="{stamp}">{text} UTC</time> ({formatting.duration(max(0.0, now - at))} ago)'
