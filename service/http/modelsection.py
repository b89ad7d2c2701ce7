"""One model's section of the status page: its load, its configuration and its drift."""

from __future__ import annotations

from html import escape

from service.http import formatting
from service.http.driftsection import MOST_OUTPUTS, drift_part, golden
from service.http.markup import code, details, fact, figure, grouped_table, table
from service.http.sparkline import sparkline
from service.http.views import SPAN_SECONDS, WINDOW_SECONDS, ModelView, RuntimeView
from service.telemetry.families import SECONDS
from service.telemetry.history import TICKS, RecentActivity
from service.telemetry.quantiles import Durations

_SPAN = f"last {formatting.duration(SPAN_SECONDS)}"
_PROOFS = {
    "fp32": "fp32: measured on this device when the model was loaded",
    "bf16": "bf16: measured on this device when the model was loaded. Long sums lose digits",
    "unknown": "not known: the probe could not tell",
}


def model_section(model: ModelView, anchor: str, now: float) -> str:
    """Return the section with the id ``anchor``. ``now`` is in Unix seconds."""
    state = escape(model.state)
    parts = [
        f'<section id="{anchor}" aria-labelledby="{anchor}-name">',
        f'<h2 id="{anchor}-name">{escape(model.label)} <span class="state {state}">{state}</span></h2>',
    ]
    if model.reason not in ("", model.state):
        parts.append(f'<p class="reason {state}">{escape(model.reason)}</p>')
    if model.recent is not None and model.running is not None:
        parts += [_trends(model, model.recent), drift_part(model.recent, model.running, now, model.reference_off)]
        parts.append(f'<div class="pair">\n{_latency(model.recent)}\n{_configuration(model.running)}\n</div>')
    elif model.running is not None:
        parts.append(_configuration(model.running, fact("Golden gate", golden(model.running))))
    if model.recent is not None:
        parts.append(details("Answers and rejections by reason", _outcomes(model.recent)))
    if model.running is not None:
        parts.append(details("Inputs and outputs", _tensors(model.running)))
    return "\n".join([*parts, "</section>"])


# --- load -------------------------------------------------------------------------------------------------------------


def _trends(model: ModelView, recent: RecentActivity) -> str:
    counts, trend = recent.counts, recent.trend
    batches = f", mean batch {formatting.number(counts.rows / counts.batches)}" if counts.batches else ""
    rows = f"{formatting.number(recent.per_second(counts.rows))} rows/s{batches}"
    failed = recent.per_second(counts.failed)
    return "\n".join(
        [
            '<dl class="figures trends">',
            figure(
                "Answered/s",
                formatting.number(recent.per_second(counts.answered)),
                rows + (f"; {formatting.number(failed)} rejected or failed per second" if failed else ""),
                picture=sparkline(
                    "Requests per second", _SPAN, trend.requests_per_second, formatting.number, length=TICKS
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
                formatting.number(recent.queue_depth),
                f"{recent.in_flight} in flight; wait p99 {latency(recent.queue.p99)}",
                picture=sparkline("Waiting requests", _SPAN, trend.waiting, formatting.number, length=TICKS),
            ),
            _drift_figure(model.drift_ratio, recent),
            "</dl>",
        ]
    )


def _drift_figure(ratio: float | None, recent: RecentActivity) -> str:
    note = f"{formatting.plural(recent.total.samples.get('measured', 0), 'sample')} measured"
    if dropped := recent.total.samples.get("dropped", 0):
        note += f", {dropped:,} dropped"
    if failed := recent.total.samples.get("failed", 0):
        note += f", {failed:,} failed"
    picture = sparkline(
        "Drift against its budget", _SPAN, recent.trend.drift, formatting.share, length=TICKS, bound=1.0
    )
    if ratio is None:
        return figure("Drift, of its budget", formatting.NONE, note, picture=picture)
    over = recent.drift.over
    note += "; over its budget" if over else ""
    return figure("Drift, of its budget", formatting.share(ratio), note, over=over, picture=picture)


def _latency(recent: RecentActivity) -> str:
    phases = (("request", recent.request), ("queue", recent.queue), ("compute", recent.compute))
    columns = ("phase", "mean", "p50", "p90", "p99")
    caption = f"{_window(recent).capitalize()}; compute time is per batch"
    phased = table(caption, columns, [_phase(*phase) for phase in phases])
    return f"<div>\n<h3>Latency</h3>\n{phased}\n</div>"


def _phase(name: str, durations: Durations) -> tuple[str, ...]:
    return (
        name,
        formatting.seconds(durations.mean),
        latency(durations.p50),
        latency(durations.p90),
        latency(durations.p99),
    )


def latency(percentile: float | None) -> str:
    """Format a percentile. Beyond the last bucket only that bound is known."""
    beyond = percentile is not None and percentile >= SECONDS[-1]
    return f"over {formatting.seconds(SECONDS[-1])}" if beyond else formatting.seconds(percentile)


def _window(recent: RecentActivity) -> str:
    return f"last {formatting.duration(min(recent.seconds, WINDOW_SECONDS))}"


# --- configuration ----------------------------------------------------------------------------------------------------


def _configuration(running: RuntimeView, *more: str) -> str:
    profile = escape(running.profile) + (f"; {escape(running.choice)}" if running.choice else "")
    proof = _PROOFS.get(running.accumulation, running.accumulation)
    facts = [
        fact("Runtime", escape(f"{running.backend} on {running.device}")),
        fact("Profile", profile),
        fact("Precision", escape(running.precision)),
        fact("Accumulation", f"<span{' class=over' if running.accumulation != 'fp32' else ''}>{escape(proof)}</span>"),
        fact("CPU kernel", escape(running.kernel or "none")),
        fact("Weights", formatting.size(running.weight_bytes)),
        fact("Batching", escape(_batching(running))),
        *more,
    ]
    if running.note:
        facts.append(fact("Note", escape(running.note)))
    return "\n".join(["<div>", "<h3>How it runs</h3>", '<dl class="facts">', *facts, "</dl>", "</div>"])


def _batching(running: RuntimeView) -> str:
    at_once = "one batch at once" if running.instances == 1 else f"{running.instances} batches at once"
    if not running.max_batch_size:
        return f"off, {at_once}"
    wait = running.max_queue_delay_seconds
    delay = f"waiting up to {formatting.seconds(wait)} for more" if wait else "from waiting requests, without delay"
    return f"up to {running.max_batch_size} rows, {delay}; {at_once}"


# --- folded details ---------------------------------------------------------------------------------------------------


def _outcomes(recent: RecentActivity) -> str:
    now, total = recent.counts, recent.total
    kinds = (
        ("answered, by gRPC status", now.codes, total.codes),
        ("rejected before it ran", now.rejected, total.rejected),
    )
    groups = {
        kind: [(code(name), f"{recently.get(name, 0):,}", f"{count:,}") for name, count in in_total.items()]
        for kind, recently, in_total in kinds
        if in_total
    }
    if not groups:
        return "<p>No request has come yet.</p>"
    return grouped_table("Requests", ("", _window(recent), "since it was loaded"), groups)


def _tensors(running: RuntimeView) -> str:
    return (
        '<dl class="facts">'
        + fact("Inputs", _lines(running.inputs))
        + fact("Outputs", _lines(running.outputs))
        + "</dl>"
    )


def _lines(names: tuple[str, ...]) -> str:
    left = [f"and {len(names) - MOST_OUTPUTS} more"] if len(names) > MOST_OUTPUTS else []
    return "<br>".join([*map(code, names[:MOST_OUTPUTS]), *left])
