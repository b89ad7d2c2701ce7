"""The conversion report: one page that loads nothing else."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import reported

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import OracleEntry
from bf16kit.converter.report.page import render

_VOID = {"meta", "br", "link", "img", "hr", "input"}


class _Page(HTMLParser):
    """Checks that tags are balanced; collects them and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_loads_nothing_and_has_what_the_conversion_found(mlp: Artifact) -> None:
    page = _Page(mlp.file("report.html").read_text())
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert page.links == []
    manifest = mlp.manifest
    assert manifest.source.sha256 in page.text
    assert f"matplotlib {manifest.tools['matplotlib']}" in page.text
    assert "drift was measured on random inputs (seed 0), because --samples was not given" in page.text
    for name, entry in manifest.files.items():
        if name != "report.html":  # it cannot hold its own digest
            assert entry.sha256 in page.text
    for tensor in manifest.plan.tensors:
        assert tensor.name in page.text
        assert tensor.reason in page.text


@pytest.mark.long
def test_a_missing_package_is_reported_before_anything_is_converted_and_no_report_needs_none(
    onnx_file: Path, target: Path
) -> None:
    program = """
import sys
from importlib import metadata
known = metadata.version
sys.modules |= dict.fromkeys(("matplotlib", "jinja2"))
def version(name):
    if name == "matplotlib":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
from bf16kit.converter.cli import run
sys.exit(run(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, "checkpoint", str(onnx_file), "--out", str(target)]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "the report needs matplotlib: pip install 'bf16kit[convert]', or convert with --no-report" in failed.stderr
    assert subprocess.run([*command, "--no-report"], capture_output=True).returncode == 0
    manifest = Artifact.open(target).manifest
    assert ("report.html" in manifest.files, "matplotlib" in manifest.tools) == (False, False)


@pytest.mark.long
def test_the_report_of_a_model_with_thousands_of_nodes_stays_small(mlp: Artifact) -> None:
    manifest = reported.manifest(samples=4_000, nodes=50_000)
    text = render(manifest, manifest.files, [], reported.measurements(samples=4_000, depth=4_000))
    assert len(text) < 1_500_000
    page = _Page(text)
    assert "200 of 50,000" in page.text
    assert "layer0/3" in page.text
    assert "20 of 4,000, measurements.json has more" in page.text


def test_the_verdict_stands_at_the_top_in_words_and_not_in_colour_alone() -> None:
    for over, mark, words in ((False, "✓", "keep within the drift"), (True, "✗", "cuda is over the drift budget")):
        manifest = reported.manifest(over=over)
        text = _Page(render(manifest, manifest.files, [], None)).text
        assert f"{mark} " in text
        assert text.index(words) < text.index("Drift from the fp32 reference")


def test_the_report_shows_everything_that_was_measured() -> None:
    manifest = reported.manifest()
    text = _Page(render(manifest, manifest.files, [], reported.measurements())).text
    for expected in (
        "The fp32 reference itself is within 3.1e-07 of the torch module (4 runs; fp32 noise explains 1e-05)",
        "A search of 41 candidates reduced the drift of cuda from 1.62 × to 0.61 × its budget: 99% of the bytes of its",
        "kept in fp32 to meet the budget of cuda",
        "30 of cuda: normalisation computes in fp32",
        f"cuda: falls below its predicted SQNR at {reported.OFF}",
        f"cuda: SQNR falls below its prediction at {reported.OFF} (MatMul): ",
        "No remedy is needed, because the budget is met on all samples together.",
        "12 flushed to zero",
        "onnxruntime 1.24 or later",
        "torch 2.13.0",
        "matrix of 147456 values (21); ",
    ):
        assert expected in text, expected


def test_the_size_on_disk_counts_every_file_the_page_and_the_manifest_included(mlp: Artifact) -> None:
    """Without these two, this small artifact would seem to be less than half as large."""
    text = _Page(mlp.file("report.html").read_text()).text
    total = sum(file.stat().st_size for file in mlp.path.iterdir())
    shown = re.search(r"([\d.]+) ×\s*the checkpoint: ([\d.]+) kB, with the residual", text)
    assert shown is not None
    assert float(shown[2]) == pytest.approx(total / 1000, rel=0.005)
    assert float(shown[1]) == pytest.approx(total / mlp.manifest.source.bytes, rel=0.005)


def test_a_remedy_is_suggested_for_a_model_over_budget_and_none_for_a_sound_one(mlp: Artifact) -> None:
    manifest = reported.manifest(over=True)
    text = _Page(render(manifest, manifest.files, [], reported.measurements(over=True))).text
    assert "in fp32 would raise output logits from 31.4 to 44.9 dB (tested on the CPU):" in text
    assert f"--keep-fp32 '{reported.REMEDY.keep_fp32}'" in text
    assert text.count("--keep-fp32 '") == 1
    text = _Page(mlp.file("report.html").read_text()).text
    assert text.count("Every output has the SQNR predicted for rounding to bf16") == 2
    assert text.count("No remedy is needed.") == 2
    assert "--keep-fp32" not in text


def test_a_reference_that_was_not_checked_is_reported_as_such_and_a_note_is_escaped_and_keeps_its_lines() -> None:
    oracle = OracleEntry(checked=False, how="a bare state dict answers nothing")
    manifest = reported.manifest().model_copy(update={"oracle": oracle})
    page = render(manifest, manifest.files, ["two islands:\n  <script>\n  other\x1b"])
    assert "<script" not in page
    assert "two islands:\n  <script>\n  other\\x1b" in _Page(page).text
    assert "not checked against the source: a bare state dict answers nothing" in _Page(page).text


def test_bars_are_in_proportion_to_sizes_and_to_a_tensors_exponents() -> None:
    """The ends of a tensor's bar are 2^-150 and 2^134; one of zeros has none."""
    manifest, found = reported.manifest(), reported.measurements()
    shown = ["head.temperature", "unused.weight"]
    ranges = found.ranges.model_copy(update={"tensors": {name: found.ranges.tensors[name] for name in shown}})
    page = render(manifest, manifest.files, [], found.model_copy(update={"ranges": ranges}))
    assert re.findall(r'class="meter range".*?(?:margin-left:([\d.]+)%;width:([\d.]+)%|</span></td>)', page) == [
        ("52.8", "45.1"),
        ("", ""),
    ]
    bars = re.findall(r"width:([\d.]+)%;background:var\(--([\w-]+)\)", page)
    assert [colour for _, colour in bars] == ["before", "accent", *["accent-soft"] * 3]
    checkpoint, whole, *parts = (float(width) for width, _ in bars)
    assert [checkpoint, whole, sum(parts)] == pytest.approx([99.2, 100.0, 100.0], abs=0.2)
