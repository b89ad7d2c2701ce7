"""The plots of the report: one mark for each measurement, at its position, up to a fixed number of marks."""

from __future__ import annotations

import math
from xml.etree.ElementTree import Element, fromstring

import pytest
import reported

from bf16kit.drift.measurements import DiagnosisEntry, LayerEntry, Layers, Ranges, RemedyEntry, ranges
from bf16kit.drift.verdicts import SampleSeries
from converter.report import plots
from converter.report.exponentranges import spans
from converter.report.figures import Sizes
from converter.report.layers import series


def _dots(tree: Element, kind: str | None = None) -> list[Element]:
    found = [e for e in tree.iter() if "dot" in e.get("class", "").split()]
    return [e for e in found if kind is None or kind in e.get("class", "").split()]


def _samples(values: list[float], *bounds: tuple[str, float], measured: int | None = None) -> Element:
    kept = tuple(values)
    shown = SampleSeries("cpu", "y", False, measured or len(kept), kept, bounds)
    return fromstring(plots.sample_dots(shown, "k"))


def test_each_sample_is_a_dot_and_those_above_the_budget_are_squares() -> None:
    tree = _samples([0.001, 0.02, 0.03, 0.004], ("relative_l2", 0.015))
    assert [dot.tag for dot in _dots(tree)] == ["circle", "rect", "rect", "circle"]
    assert len(_dots(tree, "over")) == 2
    heights = [float(dot.get("cy") or dot.get("y") or 0) for dot in _dots(tree)]
    assert heights[2] < heights[1] < heights[3] < heights[0]  # y grows downwards in SVG
    assert "2 samples are above the line" in (tree[1].text or "")
    assert [dot[0].text for dot in _dots(tree)][1] == "sample 1: 0.02"


def test_the_budget_and_its_quantiles_are_labelled_lines() -> None:
    tree = _samples([0.001], ("relative_l2", 0.015), ("relative_l2.p99", 0.02))
    assert len([e for e in tree.iter() if e.get("class") == "line budget"]) == 2
    texts = [e.text for e in tree.iter("text")]
    assert "budget of the mean: 0.015" in texts
    assert "budget of p99: 0.02" in texts


def test_without_a_budget_no_sample_is_above_it() -> None:
    assert _dots(_samples([1.0, 2.0]), "over") == []


@pytest.mark.parametrize("values", [[0.0], [math.inf, 0.001], [math.inf], []])
def test_drift_that_is_zero_infinite_or_empty_is_drawn_within_the_picture(values: list[float]) -> None:
    tree = _samples(values, ("relative_l2", 0.015))
    assert len(_dots(tree)) == len(values)
    assert "nan" not in plots.sample_dots(SampleSeries("cpu", "y", False, len(values), tuple(values), ()), "k")
    assert all(0 <= float(dot.get("cy") or dot.get("y") or 0) <= 280 for dot in _dots(tree))


def test_of_thousands_of_samples_some_are_drawn_including_the_worst() -> None:
    values = [0.001] * 4_000
    values[1_234] = 0.5
    tree = _samples(values, measured=8_000)
    assert len(_dots(tree)) == plots.DOTS
    assert "sample 2468: 0.5" in [dot[0].text for dot in _dots(tree)]
    assert f"{plots.DOTS} of 8000 samples" in (tree[1].text or "")


def test_each_layer_is_a_dot_and_those_below_the_line_are_squares() -> None:
    tree = fromstring(plots.layer_dots(series("cuda", reported.layers(120)), "k"))
    assert len(_dots(tree)) == 120
    assert 5 < len(_dots(tree, "over")) < 40
    assert reported.OFF in (tree[1].text or "")
    assert len([e for e in tree.iter() if e.get("class") == "line expected"]) == 1


def test_exact_layers_are_counted_and_not_drawn() -> None:
    rows = [
        LayerEntry(name="exact", op="Gather", depth=0, sqnr_db=200.0, expected_db=200.0),
        LayerEntry(name="lost", op="MatMul", depth=1, sqnr_db=-200.0, expected_db=50.0),
        LayerEntry(name="fine", op="MatMul", depth=2, sqnr_db=49.0, expected_db=49.0),
    ]
    found = series("cpu", Layers(measured=3, rows=rows))
    tree = fromstring(plots.layer_dots(found, "k"))
    assert len(_dots(tree)) == 2
    assert "1 exact" in (tree[1].text or "")
    assert found.first_off is not None
    assert found.first_off.name == "lost"
    assert [row.name for row in found.worst()] == ["lost", "fine", "exact"]


def test_layers_within_the_margin_are_not_below_the_line() -> None:
    rows = [LayerEntry(name="a", op="MatMul", depth=1, sqnr_db=44.1, expected_db=50.0)]
    assert series("cpu", Layers(measured=1, rows=rows)).first_off is None
    rows = [LayerEntry(name="a", op="MatMul", depth=1, sqnr_db=43.9, expected_db=50.0)]
    assert series("cpu", Layers(measured=1, rows=rows)).first_off == rows[0]


FINE = LayerEntry(name="fine", op="MatMul", depth=1, sqnr_db=49.0, expected_db=50.0)
DIP = LayerEntry(name="dip", op="Sub", weight="w", depth=2, sqnr_db=20.0, expected_db=50.0)
MENDED = RemedyEntry(keep_fp32="^dip's$", nodes=["a", "b", "c"], output="y", before_db=20.0, after_db=48.0)


@pytest.mark.parametrize(
    ("found", "within", "said", "option"),
    [
        (None, True, "", ""),
        (
            DiagnosisEntry(ails=False),
            True,
            "The first layer below its predicted SQNR is w; later layers average its error away.",
            "",
        ),
        (DiagnosisEntry(ails=True), False, "no layer is below its predicted SQNR", ""),
        (DiagnosisEntry(ails=True, leaves=DIP), True, "No remedy is needed, because the budget is met", ""),
        (DiagnosisEntry(ails=True, leaves=DIP), False, "No remedy was looked for; bf16-convert explain", ""),
        (
            DiagnosisEntry(ails=True, leaves=DIP, tried=True),
            False,
            "Keeping nodes and weights in fp32 does not mend it",
            "",
        ),
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


def test_a_tensors_bar_spans_its_exponents_and_losses_are_labelled() -> None:
    found = spans(ranges(reported.CENSUS))
    tree = fromstring(plots.span_bars(found[:7], len(found), "k"))
    bars = [e for e in tree.iter("rect") if e.get("class", "").startswith("span")]
    assert [e.get("class") for e in bars] == ["span lossy"] * 3 + ["span"] * 4
    texts = [e.text for e in tree.iter("text")]
    assert {"2 overflow", "12 flushed to zero", "3 subnormal"} <= set(texts)
    assert "head.temperature: 2 overflow" in (tree[1].text or "")


def test_a_tensor_of_zeros_has_no_bar() -> None:
    found = [span for span in spans(ranges(reported.CENSUS)) if span.name == "unused.weight"]
    assert (found[0].low, found[0].high) == (None, None)
    assert 'class="span' not in plots.span_bars(found, 1, "k")
    assert spans(Ranges(measured=0, tensors={})) == ()


def test_sizes_are_bars_in_proportion() -> None:
    tree = fromstring(plots.sizes_bars(Sizes(100, 50, 0)))
    drawn = [float(e.get("width") or 0) for e in tree.iter("rect") if e.get("class") != "bar track"]
    assert drawn == [480.0, 240.0]
    assert len(list(fromstring(plots.sizes_bars(Sizes(100, 50, 49))).iter("rect"))) == 6


def test_an_empty_checkpoint_is_drawn() -> None:
    assert fromstring(plots.sizes_bars(Sizes(0, 0, 0))).tag == "svg"
