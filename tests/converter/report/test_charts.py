"""The charts of the report: one mark for each measurement, at its position, up to a fixed number of marks."""

import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import pytest
import reported

from bf16kit.converter.report import charts
from bf16kit.converter.report.figures import series
from bf16kit.drift.measurements import DiagnosisEntry, LayerEntry, Layers, RemedyEntry
from bf16kit.drift.verdicts import SampleSeries

SVG = "{http://www.w3.org/2000/svg}"


def _marks(tree: Element) -> list[Element]:
    return list(tree.iter(f"{SVG}use"))


def _tips(tree: Element, style: str = "") -> list[str]:
    groups = [group for group in tree.iter(f"{SVG}g") if style in group.get("style", "")]
    return [mark[0].text or "" for group in groups for mark in group.findall(f"{SVG}use")]


def _over(tree: Element) -> list[str]:
    return _tips(tree, "--bad")


def _samples(values: list[float], *bounds: tuple[str, float], measured: int | None = None) -> Element:
    kept = tuple(values)
    return fromstring(charts.samples_chart(SampleSeries("cpu", "y", False, measured or len(kept), kept, bounds), "k"))


def test_each_sample_is_a_mark_and_those_above_the_budget_are_squares() -> None:
    tree = _samples([0.001, 0.02, 0.03, 0.004], ("relative_l2", 0.015))
    assert _tips(tree) == ["sample 0: 0.001", "sample 3: 0.004", "sample 1: 0.02", "sample 2: 0.03"]
    assert _over(tree) == ["sample 1: 0.02", "sample 2: 0.03"]
    heights = [float(mark.get("y", "")) for mark in _marks(tree)]
    assert heights == sorted(heights, reverse=True)  # y grows downwards in SVG
    assert len({mark.get("{http://www.w3.org/1999/xlink}href") for mark in _marks(tree)}) == 2
    assert "2 samples are above the line" in (tree[1].text or "")


def test_the_budget_and_its_quantiles_are_labelled_lines() -> None:
    tree = _samples([0.001], ("relative_l2", 0.015), ("relative_l2.p99", 0.02))
    assert len([e for e in tree.iter(f"{SVG}path") if "stroke: var(--bad)" in e.get("style", "")]) == 2
    assert {"budget of the mean: 0.015", "budget of p99: 0.02"} <= {each.text for each in tree.iter(f"{SVG}text")}
    assert _over(_samples([1.0, 2.0])) == []


@pytest.mark.parametrize("values", [[0.0], [math.inf, 0.001], [math.nan], []])
def test_drift_that_is_zero_infinite_or_empty_is_drawn_within_the_picture(values: list[float]) -> None:
    tree = _samples(values, ("relative_l2", 0.015))
    assert len(_marks(tree)) == len(values)
    assert all(0 <= float(mark.get("y", "")) <= 280 for mark in _marks(tree))


def test_of_thousands_of_samples_some_are_drawn_including_the_worst() -> None:
    values = [0.001] * 4_000
    values[1_234] = 0.5
    tree = _samples(values, measured=8_000)
    assert len(_marks(tree)) == charts.DOTS
    assert "sample 2468: 0.5" in _tips(tree)
    assert f"{charts.DOTS} of 8000 samples" in (tree[1].text or "")


def test_each_layer_is_a_mark_and_those_below_their_prediction_are_squares() -> None:
    tree = fromstring(charts.layers_chart(series("cuda", reported.layers(120)), "k"))
    assert len(_marks(tree)) == 120
    assert 5 < len(_over(tree)) < 40
    assert reported.OFF in (tree[1].text or "")
    assert len([e for e in tree.iter(f"{SVG}path") if "stroke-dasharray" in e.get("style", "")]) == 1


def test_exact_layers_are_counted_and_not_drawn_and_those_within_the_margin_are_not_off() -> None:
    rows = [
        LayerEntry(name="exact", op="Gather", depth=0, sqnr_db=200.0, expected_db=200.0),
        LayerEntry(name="lost", op="MatMul", depth=1, sqnr_db=-200.0, expected_db=50.0),
        LayerEntry(name="fine", op="MatMul", depth=2, sqnr_db=49.0, expected_db=49.0),
    ]
    found = series("cpu", Layers(measured=3, rows=rows))
    tree = fromstring(charts.layers_chart(found, "k"))
    assert len(_marks(tree)) == 2
    assert "1 exact" in (tree[1].text or "")
    assert found.first_off is not None
    assert found.first_off.name == "lost"
    assert [row.name for row in found.worst()] == ["lost", "fine", "exact"]
    margin = [LayerEntry(name="a", op="MatMul", depth=1, sqnr_db=db, expected_db=50.0) for db in (44.1, 43.9)]
    assert [series("cpu", Layers(measured=1, rows=[row])).first_off for row in margin] == [None, margin[1]]


FINE = LayerEntry(name="fine", op="MatMul", depth=1, sqnr_db=49.0, expected_db=50.0)
DIP = LayerEntry(name="dip", op="Sub", weight="w", depth=2, sqnr_db=20.0, expected_db=50.0)
MENDED = RemedyEntry(keep_fp32="^dip's$", nodes=["a", "b", "c"], output="y", before_db=20.0, after_db=48.0)


@pytest.mark.parametrize(
    ("found", "within", "said", "option"),
    [
        (None, True, "", ""),
        (DiagnosisEntry(ails=False), True, "its predicted SQNR is w; later ones average its error away.", ""),
        (DiagnosisEntry(ails=True), True, "over budget, though no layer is below its predicted SQNR", ""),
        (DiagnosisEntry(ails=True, leaves=DIP), True, "No remedy is needed, because the budget is met", ""),
        (DiagnosisEntry(ails=True, leaves=DIP), False, "No remedy was looked for; bf16-convert explain", ""),
        (DiagnosisEntry(ails=True, leaves=DIP, tried=True), False, "in fp32 does not mend it", ""),
        (
            DiagnosisEntry(ails=True, leaves=DIP, tried=True, remedy=MENDED),
            False,
            "SQNR falls below its prediction at dip (Sub): 20.0 dB, predicted 50.0 dB. Keeping a, b and c in fp32",
            """--keep-fp32 '^dip'"'"'s$'""",
        ),
    ],
)
def test_the_layers_state_the_diagnosis_and_the_remedy(
    found: DiagnosisEntry | None, within: bool, said: str, option: str
) -> None:
    told = series("cpu", Layers(measured=2, rows=[FINE, DIP], diagnosis=found), within=within)
    assert said in told.summary
    assert bool(told.summary) == bool(said)
    assert told.option == option


def test_a_users_settings_of_matplotlib_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.grid: False\nsvg.fonttype: path\n")
    program = "import reported; from bf16kit.converter.report import charts, figures;"
    program += "print(charts.layers_chart(figures.series('cuda', reported.layers(120)), 'k'))"
    environment = {**os.environ, "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == charts.layers_chart(series("cuda", reported.layers(120)), "k")
