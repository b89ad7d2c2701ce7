"""A real Prometheus with the rules of deploy/prometheus, which scrapes once a second."""

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import pytest
import yaml
from logfile import LogFile
from waiting import until

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
_ADDRESS = re.compile(r'msg="Listening on" address=(?:\[::\]|[\d.]+):(\d+)')


def find() -> str | None:
    """Return the path of the binary; Debian's package contains it together with promtool."""
    return shutil.which("prometheus")


needed = pytest.mark.skipif(find() is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)")


class Prometheus:
    """Scrapes the server whose HTTP port is ``port``. Its files are under ``where``. A context manager.

    ``at_once``: alerts fire as soon as their expression is true. The tests with promtool check how long it must be
    true; they have a simulated clock. ``labels`` are the target's labels in addition to job and instance.
    ``others`` are the ports of further servers.
    """

    def __init__(
        self,
        port: int,
        where: Path,
        *,
        at_once: bool = False,
        labels: Mapping[str, str] = MappingProxyType({}),
        others: Iterable[int] = (),
    ) -> None:
        where.mkdir()
        (where / "rules").mkdir()
        for path in RULES.glob("*.yml"):
            (where / "rules" / path.name).write_text(hasty(path) if at_once else path.read_text("utf-8"), "utf-8")
        target = {"targets": [f"127.0.0.1:{each}" for each in (port, *others)], "labels": dict(labels)}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules/*.yml"],
            "scrape_configs": [{"job_name": "bf16kit", "static_configs": [target]}],
        }
        (where / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
        binary = find()
        assert binary is not None
        self._log = LogFile()
        self._process = subprocess.Popen(
            [
                *(binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
                *("--web.listen-address=127.0.0.1:0", "--enable-feature=exemplar-storage"),
            ],
            cwd=where,
            stderr=self._log.fileno(),
        )

    def __enter__(self) -> Self:
        try:
            until(lambda: _ADDRESS.search(self._log.text) or self._process.poll() is not None, 60, "its port")
            found = _ADDRESS.search(self._log.text)
            assert found is not None, self._log.text
            self._port = int(found[1])
            until(self._ready, 60, "Prometheus' readiness")
            until(lambda: self.query("up"), 60, "a first scrape")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def ask(self, path: str, **parameters: str) -> Any:
        """Return ``data`` of a response of the HTTP API. Raises AssertionError if its status is not success."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, promql: str) -> list[dict[str, str]]:
        """Return the labels of each series of an instant query, with its value under the key ``""``."""
        return [{**each["metric"], "": each["value"][1]} for each in self.ask("query", query=promql)["result"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def fired(self, since: float) -> dict[tuple[str, str], float]:
        """Return when each alert of each model first fired, in seconds after ``since``, a Unix time."""
        window = f"{max(1, math.ceil(time.time() - since))}s:1s"
        first = self.query(f'min_over_time(timestamp(ALERTS{{alertstate="firing"}})[{window}])')
        found: dict[tuple[str, str], float] = {}
        for each in first:
            key = each["alertname"], each.get("model", "")
            found[key] = min(found.get(key, math.inf), float(each[""]) - since)
        return found

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=20):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False


def hasty(path: Path) -> str:
    """Return a file of rules, changed so that alerts fire as soon as their expression is true."""
    rules = yaml.safe_load(path.read_text("utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
            rule.pop("keep_firing_for", None)
            if ":for" in rule.get(
                "record", ""
            ):  # how long an instance has been in a state; longer than between scrapes
                rule["expr"] = re.sub(r"\[\d+[mh]\]", "[10s]", re.sub(r" offset \d+[mh]", " offset 1s", rule["expr"]))
    return yaml.safe_dump(rules)
