"""One model's part of the status page: how it does, how it runs, and how far it drifts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from bf16kit.budget import Budget
from service.contract import GATE_FAILED
from service.status_http import amounts
from service.status_http.markup import code, details, fact, figure, grouped_table, meter, table
from service.status_http.sparkline import sparkline
from service.status_http.views import SPAN_SECONDS, WINDOW_SECONDS, ModelView, Running
from service.telemetry.history import TICKS, Recent
from service.telemetry.quantiles import Durations
from service.telemetry.vocabulary import SECONDS

_SPAN = f"last {amounts.duration(SPAN_SECONDS)}"
_MOST_OUTPUTS = 20  # rows of the table of drift, and names of tensors
_PROOFS = {
    "fp32": "fp32: measured on this device when the model was loaded",
    "bf16": "bf16: measured on this device when the model was loaded. Long sums lose digits",
    "unknown": "not known: the probe could not tell",
}


def model_section(model: ModelView, anchor: str) -> str:
    """The section with the id ``anchor``."""
    state = escape(model.state)
    parts = [
        f'<section id="{anchor}" aria-labelledby="{anchor}-name">',
        f'<h2 id="{anchor}-name">{escape(model.label)} <span class="state {state}">{state}</span></h2>',
    ]
    if model.reason not in ("", model.state):
        parts.append(f'<p class="reason {state}">{escape(model.reason)}</p>')
    if model.recent is not None and model.running is not None:
        parts += [_trends(model, model.recent), _numbers(model.recent, model.running)]
    if model.running is not None:
        parts.append(_how(model.running))
    if model.recent is not None:
        parts.append(details("Answers and rejections by reason", _outcomes(model.recent)))
    if model.running is not None:
        parts.append(details("Inputs and outputs", _tensors(model.running)))
    return "\n".join([*parts, "</section>"])


# --- how it does ------------------------------------------------------------------------------------------------------


def _trends(model: ModelView, recent: Recent) -> str:
    counts, trend = recent.counts, recent.trend
    batches = f", mean batch {amounts.number(counts.rows / counts.batches)}" if counts.batches else ""
    rows = f"{amounts.number(recent.per_second(counts.rows))} rows/s{batches}"
    failed = recent.per_second(counts.failed)
    return "\n".join(
        [
            '<dl class="figures trends">',
            figure(
                "Answered/s",
                amounts.number(recent.per_second(counts.answered)),
                rows + (f"; {amounts.number(failed)} refused or failed per second" if failed else ""),
                picture=sparkline(
                    "Requests per second", _SPAN, trend.requests_per_second, amounts.number, length=TICKS
                ),
            ),
            figure(
                "Latency, p99",
                latency(recent.request.p99),
                f"p50 {latency(recent.request.p50)}, p90 {latency(recent.request.p90)}",
                picture=sparkline("Latency p99", _SPAN, trend.p99_seconds, latency, length=TICKS),
            ),
            figure(
                "In the queue now",
                amounts.number(recent.queue_depth),
                f"{recent.in_flight} in flight; wait p99 {latency(recent.queue.p99)}",
                picture=sparkline("Waiting requests", _SPAN, trend.waiting, amounts.number, length=TICKS),
            ),
            _drift_figure(model.drift_ratio, recent),
            "</dl>",
        ]
    )


def _drift_figure(ratio: float | None, recent: Recent) -> str:
    words = f"{amounts.plural(recent.total.samples.get('measured', 0), 'sample')} measured"
    if dropped := recent.total.samples.get("dropped", 0):
        words += f", {dropped:,} dropped"
    if failed := recent.total.samples.get("failed", 0):
        words += f", {failed:,} failed"
    picture = sparkline("Drift against its budget", _SPAN, recent.trend.drift, amounts.share, length=TICKS, bound=1.0)
    if ratio is None:
        return figure("Drift, of its budget", amounts.NONE, words, picture=picture)
    over = ratio > 1
    words += "; over its budget" if over else ""
    return figure("Drift, of its budget", amounts.share(ratio), words, over=over, picture=picture)


def _numbers(recent: Recent, running: Running) -> str:
    phases = (("request", recent.request), ("queue", recent.queue), ("compute", recent.compute))
    columns = ("phase", "mean", "p50", "p90", "p99")
    phased = table(f"Of the {_window(recent)}; compute is of a batch", columns, [_phase(*phase) for phase in phases])
    return (
        f'<div class="pair">\n<div>\n<h3>Latency</h3>\n{phased}\n</div>\n'
        f"<div>\n<h3>Drift</h3>\n{_drift(recent, running)}\n</div>\n</div>"
    )


def _phase(name: str, seen: Durations) -> tuple[str, ...]:
    return name, amounts.seconds(seen.mean), latency(seen.p50), latency(seen.p90), latency(seen.p99)


def latency(percentile: float | None) -> str:
    """Of what lies beyond the last bucket no more is known than that."""
    beyond = percentile is not None and percentile >= SECONDS[-1]
    return f"over {amounts.seconds(SECONDS[-1])}" if beyond else amounts.seconds(percentile)


def _window(recent: Recent) -> str:
    return f"last {amounts.duration(min(recent.seconds, WINDOW_SECONDS))}"


def _drift(recent: Recent, running: Running) -> str:
    if not recent.ratios:
        return f'<p class="muted">No sample was measured yet. {_budget(running.budget)}</p>'
    budget = Budget.from_dict(running.budget)
    shown = list(recent.ratios.items())[:_MOST_OUTPUTS]
    groups = {
        code(output): [
            _bound(metric, ratio, budget, recent.baseline.get(output, {})) for metric, ratio in metrics.items()
        ]
        for output, metrics in shown
    }
    columns = ("metric", "recent", "budget", "used", "baseline")
    more = len(recent.ratios) - len(shown)
    left = f'<p class="muted">{amounts.plural(more, "more output")} in /status.json.</p>' if more else ""
    return grouped_table("The newest samples against the fp32 reference", columns, groups, wide=1) + left


def _bound(metric: str, ratio: float, budget: Budget, baseline: Mapping[str, float]) -> tuple[str, ...]:
    words = f'<span class="share{" over" if ratio > 1 else ""}">{amounts.share(ratio)}</span>'
    bound, recent = budget.bound(metric), budget.measured(metric, ratio)
    numbers = (
        amounts.number(recent),
        amounts.number(bound),
        f"{meter(ratio)} {words}",
        amounts.number(baseline.get(metric)),
    )
    return escape(metric), *numbers


def _budget(bounds: Mapping[str, float]) -> str:
    listed = ", ".join(f"{name} {amounts.number(bound)}" for name, bound in bounds.items())
    return f"The budget: {escape(listed)}." if listed else "There is no budget."


# --- how it runs ------------------------------------------------------------------------------------------------------


def _how(running: Running) -> str:
    profile = escape(running.profile) + (f"; {escape(running.choice)}" if running.choice else "")
    proof = _PROOFS.get(running.accumulation, running.accumulation)
    failed = " class=over" if running.golden.startswith(GATE_FAILED) else ""
    facts = [
        fact("Runtime", escape(f"{running.backend} on {running.device}")),
        fact("Profile", profile),
        fact("Precision", escape(running.precision)),
        fact("Answers in", _answers(running)),
        fact("Accumulation", f"<span{' class=over' if running.accumulation != 'fp32' else ''}>{escape(proof)}</span>"),
        fact("CPU kernel", escape(running.kernel or "none")),
        fact("Golden gate", f"<span{failed}>{escape(running.golden)}</span>"),
        fact("Weights", amounts.size(running.weight_bytes)),
        fact("Batching", escape(_batching(running))),
    ]
    if running.note:
        facts.append(fact("Note", escape(running.note)))
    return "\n".join(["<h3>How it runs</h3>", '<dl class="facts">', *facts, "</dl>"])


def _answers(running: Running) -> str:
    """What answers now; marked where that is not bf16, or should not be."""
    reason = running.active_precision_reason
    said = escape(running.active_precision + (f": {reason}" if reason else ""))
    return f'<span class="over">{said}</span>' if reason else said


def _batching(running: Running) -> str:
    at_once = "one batch at once" if running.instances == 1 else f"{running.instances} batches at once"
    if not running.max_batch_size:
        return f"off, {at_once}"
    wait = running.max_queue_delay_seconds
    delay = f"waiting up to {amounts.seconds(wait)} for more" if wait else "of what is there, waiting for no more"
    return f"up to {running.max_batch_size} rows, {delay}; {at_once}"


# --- folded -----------------------------------------------------------------------------------------------------------


def _outcomes(recent: Recent) -> str:
    now, total = recent.counts, recent.total
    kinds = (
        ("answered, by gRPC status", now.codes, total.codes),
        ("rejected before it ran", now.rejected, total.rejected),
    )
    groups = {
        kind: [(code(name), f"{seen.get(name, 0):,}", f"{count:,}") for name, count in every.items()]
        for kind, seen, every in kinds
        if every
    }
    if not groups:
        return "<p>No request has come yet.</p>"
    return grouped_table("Requests", ("", _window(recent), "since it was loaded"), groups)


def _tensors(running: Running) -> str:
    return (
        '<dl class="facts">'
        + fact("Inputs", _lines(running.inputs))
        + fact("Outputs", _lines(running.outputs))
        + "</dl>"
    )


def _lines(names: tuple[str, ...]) -> str:
    left = [f"and {len(names) - _MOST_OUTPUTS} more"] if len(names) > _MOST_OUTPUTS else []
    return "<br>".join([*map(code, names[:_MOST_OUTPUTS]), *left])
