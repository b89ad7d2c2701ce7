"""The series of a scrape, to look up the names of metrics, their labels and values."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from promql import grouped, selectors

SCRAPE = {"job", "instance"}  # the labels that Prometheus adds to every series
CLUSTER = {"namespace", "service"}  # the labels that it adds if the Prometheus operator for Kubernetes configured it
ITS_OWN = {"up": SCRAPE, "ALERTS": {"alertname", "alertstate", "severity", "model", "version", *SCRAPE}}


class Scraped:
    """The series of ``/metrics``, and those that recording rules compute from them. Other ``rules`` are ignored."""

    def __init__(self, text: str, rules: Iterable[Mapping[str, Any]] = ()) -> None:
        self.labels: dict[str, set[str]] = {name: set(labels) for name, labels in ITS_OWN.items()}
        self.values: dict[tuple[str, str], set[str]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.labels.setdefault(sample.name, set(SCRAPE)).update(sample.labels)
                for label, value in sample.labels.items():
                    self.values.setdefault((sample.name, label), set()).add(value)
        computed: dict[str, set[str]] = {}
        for rule in rules:  # each may use those before it
            if "record" in rule:
                used = (computed.get(selector.metric, set()) for selector in selectors(rule["expr"]))
                computed[rule["record"]] = grouped(rule["expr"]).union(rule.get("labels", ()), *used)
                if " by (" not in rule["expr"]:
                    raw = (self.labels.get(selector.metric, set()) for selector in selectors(rule["expr"]))
                    computed[rule["record"]] = computed[rule["record"]].union(*raw)
        self.labels |= computed

    def unknown(self, expression: str, free: Iterable[str] = ("model", "version", *SCRAPE)) -> list[str]:
        """Return messages about the expression's names that do not exist. ``free`` labels may have any value."""
        wrong: list[str] = []
        known = set[str]()
        for selector in selectors(expression):
            labels = self.labels.get(selector.metric)
            if labels is None:
                wrong.append(f"no metric {selector.metric}")
                continue
            known |= labels
            wrong += [f"no label {label} of {selector.metric}" for label in sorted(selector.labels - labels - CLUSTER)]
            for label, value in selector.equals.items():
                there = self.values.get((selector.metric, label), set())
                if label not in free and label in labels and there and value not in there:
                    wrong.append(f"no {label}={value!r} of {selector.metric}, only {sorted(there)}")
        return wrong or [f"no label {label} to group by" for label in sorted(grouped(expression) - known - CLUSTER)]
