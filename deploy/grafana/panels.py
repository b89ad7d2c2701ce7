"""The panels of the dashboard: title, queries and unit of each. ``board.py`` writes them in Grafana's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SERVER = 'job=~"$job", instance=~"$instance"'
MODEL = f'{SERVER}, model=~"$model"'
NAME = "{{model}} v{{version}}"
METRIC = "{{output}} {{metric}}"
KEYS = "job, instance, model, version"
INFO_LABELS = "instance, model, version, backend, device, profile, precision, accumulation"


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the legend of its series."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel; ``width`` is of 24 columns.

    ``bound`` is drawn as a line, and in a ``stat`` a value above it is red.
    """

    kind: Literal["stat", "lines", "heat", "states", "table"]
    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    bound: float | None = None
    width: int = 8


def _lines(title: str, description: str, *queries: Query, unit: str = "short", bound: float | None = None) -> Panel:
    return Panel("lines", title, description, queries, unit, bound)


def _stat(title: str, description: str, expression: str, unit: str = "short", bound: float | None = 0.5) -> Panel:
    return Panel("stat", title, description, (Query(expression),), unit, bound, width=4)


def _rate(metric: str, labels: str = MODEL) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def _mean(metric: str, by: str) -> str:
    return f"sum by ({by}) ({_rate(metric + '_sum')}) / sum by ({by}) ({_rate(metric + '_count')})"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le, model, version) ({_rate(metric + '_bucket')}))"


NOW = (
    _stat(
        "Alerts firing", "Of the rules in deploy/prometheus/rules, on any instance.",
        'count(ALERTS{alertstate="firing", alertname=~"Bf16.+", job=~"$job"}) or vector(0)',
    ),
    _stat("Versions not ready", "", f"count(bf16kit_model_ready{{{MODEL}}} == 0) or vector(0)"),
    _stat(
        "Over budget", "Drift is over budget beyond chance: an interval of 4.5 standard errors is above it.",
        f"sum(bf16kit_drift_over_budget{{{MODEL}}})",
    ),
    _stat("Answering in fp32", "The fp32 fallback is active.", f"sum(bf16kit_fallback_active{{{MODEL}}})"),
    _stat(
        "References down", "Versions whose shadow is on, but whose fp32 reference is not ready: no drift is measured.",
        f"count(bf16kit_drift_reference_up{{{MODEL}}} == 0) or vector(0)",
    ),
    _stat("Golden gates failed", "", f"count(bf16kit_golden_gate_passed{{{MODEL}}} == 0) or vector(0)"),
)  # fmt: skip

DRIFT = (
    Panel(
        "lines", "Drift ÷ budget, with its 95 % interval",
        "The bound nearest to a breach, for each model. It is one if 4.5 standard errors below are over 100 %.",
        (
            Query(f"max by ({KEYS}) (bf16kit_drift_budget_ratio{{{MODEL}}})", f"{NAME} on {{{{instance}}}}"),
            Query(f"max by ({KEYS}) (bf16kit_drift_budget_ratio_low{{{MODEL}}})", f"{NAME} on {{{{instance}}}}, low"),
            Query(f"max by ({KEYS}) (bf16kit_drift_budget_ratio_high{{{MODEL}}})", f"{NAME} on {{{{instance}}}}, high"),
        ),
        "percentunit", bound=1.0, width=16,
    ),
    _lines(
        "Worst slice ÷ its bound", "The slice of each output with the largest error for its variation.",
        Query(
            f'bf16kit_drift_budget_ratio{{metric="slice_error", {MODEL}}}'
            f" * on ({KEYS}, output) group_right"
            f' count_values by ({KEYS}, output) ("index", bf16kit_drift_worst_slice_index{{{MODEL}}})',
            f"{NAME} {{{{output}}}}, index {{{{index}}}}",
        ),
        bound=1.0, unit="percentunit",
    ),
    Panel(
        "states", "Cause", "The cause of drift: rounding, broken or out_of_range. Empty if no problem was found.",
        (Query(f"bf16kit_drift_cause{{{MODEL}}} == 1", f"{NAME} {{{{cause}}}}"),),
    ),
    _lines(
        "Change detector", "The detector's sum ÷ its threshold; 1 is an alarm.",
        Query(f"bf16kit_drift_change_score{{{MODEL}}}", f"{NAME} {{{{output}}}}"), bound=1.0,
    ),
    _lines(
        "Live drift ÷ certified drift",
        "Mean relative_l2 of live rows ÷ that in the manifest. About 1 if requests are like the conversion's samples.",
        Query(
            f"{_mean('bf16kit_drift_relative_l2', KEYS + ', output')}"
            f' / on ({KEYS}, output) sum by ({KEYS}, output) (bf16kit_drift_baseline{{metric="relative_l2", {MODEL}}})',
            f"{NAME} {{{{output}}}}",
        ),
    ),
    _lines(
        "Top-1 agreement with fp32", "For outputs that are logits.",
        Query(
            f"sum by (model, version, output) ({_rate('bf16kit_drift_top1_matches_total')})"
            f" / sum by (model, version, output) ({_rate('bf16kit_drift_top1_rows_total')})",
            f"{NAME} {{{{output}}}}",
        ),
        unit="percentunit",
    ),
    Panel(
        "heat", "relative_l2 of live rows", "Weighted: estimates the distribution over all rows, not just samples.",
        (Query(f"sum by (le) (increase(bf16kit_drift_relative_l2_bucket{{{MODEL}}}[$__rate_interval]))", "{{le}}"),),
    ),
    _lines(
        "Effective samples", "The number of equally weighted samples that would carry as much information.",
        Query(f"bf16kit_drift_effective_samples{{{MODEL}}}", f"{NAME} {{{{output}}}}"),
    ),
    _lines(
        "Samples, by outcome", "Rows per second.",
        Query(f"sum by (outcome) ({_rate('bf16kit_drift_samples_total')})", "{{outcome}}"), unit="rowsps",
    ),
    _lines(
        "Time since the last sample", "",
        Query(f"time() - bf16kit_drift_last_sample_timestamp_seconds{{{MODEL}}}", NAME), unit="s",
    ),
    _lines(
        "Rows outside the calibrated range", "Measured rows only, by input.",
        Query(f"sum by (model, version, input) ({_rate('bf16kit_drift_out_of_range_total')})", f"{NAME} {{{{input}}}}"),
        unit="rowsps",
    ),
    _lines(
        "Elements that are not finite", "Elements of bf16 outputs that are not finite where the reference's are.",
        Query(f"sum by (model, version, output) ({_rate('bf16kit_drift_nonfinite_total')})", f"{NAME} {{{{output}}}}"),
    ),
)  # fmt: skip

ALL_REPLICAS = 'job=~"$job", model=~"$model", window="1h"'
FLEET = (
    _lines(
        "Drift of all replicas ÷ budget",
        "Mean of an hour, of replicas not over by themselves, and the lower end that Bf16FleetDriftOverBudget uses.",
        Query(f"bf16kit:drift_budget_ratio:pooled{{{ALL_REPLICAS}}}", f"{NAME} {METRIC}"),
        Query(f"bf16kit:drift_budget_ratio_low:pooled{{{ALL_REPLICAS}}}", f"{NAME} {METRIC}, low"),
        unit="percentunit", bound=1.0,
    ),
    _lines(
        "Effective requests of all replicas", "In an hour. Below 100 there is no interval.",
        Query(f'bf16kit:drift_requests:pooled{{metric="relative_l2", {ALL_REPLICAS}}}', f"{NAME} {{{{output}}}}"),
        bound=100.0,
    ),
    _lines(
        "Replicas with a problem", "",
        Query(f"sum by (model, version) (bf16kit_drift_over_budget{{{MODEL}}})", f"{NAME} over budget"),
        Query(f"sum by (model, version) (bf16kit_fallback_active{{{MODEL}}})", f"{NAME} in fp32"),
        Query(f"count by (model, version) (bf16kit_model_ready{{{MODEL}}} == 0) or vector(0)", f"{NAME} not ready"),
    ),
    Panel(
        "table", "Drift ÷ budget, the ten highest replicas", "",
        (Query(f"topk(10, max by ({KEYS}) (bf16kit_drift_budget_ratio{{{MODEL}}}))"),), width=24,
    ),
)  # fmt: skip

ACTIONS = (
    _lines(
        "Answers, by precision", "",
        Query(f"sum by (model, version, precision) ({_rate('bf16kit_answers_total')})", f"{NAME} {{{{precision}}}}"),
        unit="reqps",
    ),
    _lines(
        "Changes of precision", "Per hour; more than two fallbacks to fp32 in six hours are flapping.",
        Query(
            f"sum by (model, version, to) (increase(bf16kit_fallback_transitions_total{{{MODEL}}}[1h]))",
            f"{NAME} to {{{{to}}}}",
        ),
    ),
    _lines(
        "Time since the last golden gate", "Of the worker whose last run is oldest.",
        Query(f"time() - bf16kit_golden_gate_timestamp_seconds{{{MODEL}}}", NAME), unit="s",
    ),
)  # fmt: skip

SERVING = (
    _lines(
        "Requests, by code", "",
        Query(f"sum by (model, code) ({_rate('bf16kit_requests_total')}) > 0", "{{model}} {{code}}"), unit="reqps",
    ),
    _lines(
        "Latency", "From the request's arrival to its encoded response.",
        Query(_quantile(0.5, "bf16kit_request_duration_seconds"), f"{NAME} p50"),
        Query(_quantile(0.99, "bf16kit_request_duration_seconds"), f"{NAME} p99"),
        unit="s",
    ),
    _lines(
        "Requests over 0.25 s", "The objective allows 1 %.",
        Query('bf16kit:requests_slow:ratio_rate5m{job=~"$job", model=~"$model"}', NAME), unit="percentunit", bound=0.01,
    ),
    _lines(
        "Requests that fail", "For a reason that is the server's. The objective allows 0.1 %.",
        Query('bf16kit:requests_failed:ratio_rate5m{job=~"$job", model=~"$model"}', NAME),
        unit="percentunit", bound=0.001,
    ),
    _lines(
        "Requests that are rejected", "By the model's queue; a quarter pages.",
        Query('bf16kit:requests_rejected:ratio_rate5m{job=~"$job", model=~"$model"}', f"{NAME} {{{{reason}}}}"),
        unit="percentunit", bound=0.25,
    ),
    _lines(
        "Calls that are rejected before a model is asked", "",
        Query('bf16kit:calls_refused:ratio_rate5m{job=~"$job"}', "{{reason}}"), unit="percentunit", bound=0.25,
    ),
    _lines(
        "Queue time and compute time", "Mean queue time of requests, and mean compute time of batches.",
        Query(_mean("bf16kit_queue_duration_seconds", "model, version"), f"{NAME} queue"),
        Query(_mean("bf16kit_compute_duration_seconds", "model, version"), f"{NAME} compute"), unit="s",
    ),
    _lines(
        "Queue", "",
        Query(f"sum by (model, version) (bf16kit_queue_depth{{{MODEL}}})", f"{NAME} waiting"),
        Query(f"sum by (model, version) (bf16kit_requests_in_flight{{{MODEL}}})", f"{NAME} in flight"),
    ),
    _lines(
        "Rows per batch", "",
        Query(
            f"sum by (model, version) ({_rate('bf16kit_rows_total')})"
            f" / sum by (model, version) ({_rate('bf16kit_executions_total')})",
            NAME,
        ),
    ),
    _lines(
        "Rejected requests", "Rejected by a model's queue, or by the server before they reached a model.",
        Query(f"sum by (model, reason) ({_rate('bf16kit_rejected_total')}) > 0", "{{model}} {{reason}}"),
        Query(f"sum by (reason) ({_rate('bf16kit_refused_total', SERVER)}) > 0", "server: {{reason}}"), unit="reqps",
    ),
    _lines(
        "Memory", "Resident memory of all processes of a server.",
        Query(f"process_resident_memory_bytes{{{SERVER}}}", "{{instance}}"), unit="bytes",
    ),
    _lines("CPU cores used", "", Query(_rate("process_cpu_seconds_total", SERVER), "{{instance}}")),
    Panel(
        "table", "Models: backend, device, profile and precision", "",
        (Query(f"max by ({INFO_LABELS}) (bf16kit_model_info{{{MODEL}}})"),), width=24,
    ),
)  # fmt: skip

ROWS = {"Now": NOW, "Drift": DRIFT, "Fleet": FLEET, "Fallback and golden gate": ACTIONS, "Serving": SERVING}
