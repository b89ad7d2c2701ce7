"""Writes the Grafana dashboard beside this file; run ``python deploy/grafana/board.py`` after changing ``panels.py``.

The builders are typed by Grafana's own schema, so the result is a valid dashboard: tests/deploy/test_dashboard.py.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueColorMode, GraphThresholdsStyleMode, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from panels import ROWS, Panel

TARGET = Path(__file__).with_name("bf16kit.json")
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_BUILDERS: dict[str, Any] = {
    "stat": stat.Panel,
    "lines": timeseries.Panel,
    "heat": heatmap.Panel,
    "states": statetimeline.Panel,
    "table": table.Panel,
}
_HEIGHTS = {"stat": 4, "table": 7}


def board() -> str:
    """Return the dashboard as JSON."""
    made = (
        dashboard.Dashboard("bf16kit")
        .uid("bf16kit")
        .description(
            "Models served by bf16-serve: their live drift from fp32 and how they serve. docs/drift.md explains it."
        )
        .tags(["bf16kit"])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for name, query in (
        ("job", "label_values(bf16kit_model_ready, job)"),
        ("instance", 'label_values(bf16kit_model_ready{job=~"$job"}, instance)'),
        ("model", 'label_values(bf16kit_model_ready{job=~"$job", instance=~"$instance"}, model)'),
    ):
        made = made.with_variable(_variable(name, query))
    number = count(1)
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title).id(next(number)))
        for panel in panels:
            made = made.with_panel(_panel(panel).id(next(number)))
    encoded: str = JSONEncoder(sort_keys=True, indent=1).encode(made.build())
    return encoded + "\n"


def _variable(name: str, query: str) -> Any:
    everything = VariableOption(selected=True, text="All", value="$__all")
    made = dashboard.QueryVariable(name).query(query).datasource(_SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.multi(True).include_all(True).all_value(".*").current(everything)


def _panel(panel: Panel) -> Any:
    made = _BUILDERS[panel.kind]().title(panel.title).description(panel.description).datasource(_SOURCE)
    made = made.span(panel.width).height(_HEIGHTS.get(panel.kind, 8))
    made = made.unit(panel.unit) if panel.kind in ("stat", "lines") else made
    for letter, query in zip("ABCD", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
        made = made.with_target(_timed(target.datasource(_SOURCE), panel.kind))
    if panel.bound is not None:
        made = made.thresholds(_thresholds(panel.bound))
    if panel.kind == "stat":
        made = made.color_mode(BigValueColorMode.BACKGROUND)
    elif panel.kind == "lines":
        made = made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)).min(0)
        style = GraphThresholdsStyleMode.OFF if panel.bound is None else GraphThresholdsStyleMode.LINE
        made = made.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
    return made


def _timed(target: prometheus.Dataquery, kind: str) -> prometheus.Dataquery:
    if kind == "heat":
        return target.range().format(PromQueryFormat.HEATMAP)
    return target.instant().format(PromQueryFormat.TABLE) if kind == "table" else target.range()


def _thresholds(bound: float) -> Any:
    steps = [Threshold(value=None, color="green"), Threshold(value=bound, color="red")]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


if __name__ == "__main__":
    TARGET.write_text(board(), "utf-8")
