"""Writes the alert rules of deploy/prometheus for Kubernetes and for Helm: ``python deploy/kubernetes/rules.py``.

The Prometheus Operator needs rules as a cluster object. Helm gets them as a file, because it would interpret the braces
in a template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_DEPLOY = Path(__file__).parents[1]
_HEAD = "# Written by deploy/kubernetes/rules.py from deploy/prometheus/rules: change those.\n"


class _Dumper(yaml.SafeDumper):
    """Writes long texts as blocks, and never uses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def groups() -> dict[str, Any]:
    """Return the groups of all rules files, as one file would contain them."""
    files = sorted((_DEPLOY / "prometheus" / "rules").glob("*.yml"))
    return {"groups": [group for file in files for group in yaml.safe_load(file.read_text("utf-8"))["groups"]]}


def written() -> dict[Path, str]:
    """Return the contents of each file that is generated from the rules, by path."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "bf16kit"},
        "spec": groups(),
    }
    return {
        _DEPLOY / "kubernetes" / "components" / "monitoring" / "prometheusrule.yaml": _HEAD + _dumped(rule),
        _DEPLOY / "helm" / "bf16kit" / "files" / "rules.yaml": _HEAD + _dumped(groups()),
    }


def _dumped(content: Any) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    for path, content in written().items():
        path.write_text(content, "utf-8")
