"""The conversion report: one page that stands alone."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from converting import Cli

from bf16kit.artifact import Artifact
from converter.report.page import render

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


def test_the_page_is_well_formed_and_loads_nothing_from_elsewhere(mlp: Artifact) -> None:
    page = _Page(mlp.file("report.html").read_text())
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert page.links == []


def test_it_holds_what_the_conversion_found(mlp: Artifact) -> None:
    page = _Page(mlp.file("report.html").read_text())
    manifest = mlp.manifest
    assert manifest.source.sha256 in page.text
    assert "drift was measured on random inputs (seed 0), for want of --samples" in page.text
    for name, entry in manifest.files.items():
        if name != "report.html":  # it cannot hold its own digest
            assert entry.sha256 in page.text
    for tensor in manifest.plan.tensors:
        assert tensor.name in page.text
        assert tensor.reason in page.text


def test_drift_over_budget_stands_out(mlp: Artifact) -> None:
    strict = mlp.manifest.model_copy(update={"budget": {"relative_l2": 1e-9}})
    assert "over budget" in render(strict, strict.files, [])
    assert "over budget" not in render(mlp.manifest, mlp.manifest.files, [])


def test_notes_are_escaped(mlp: Artifact) -> None:
    assert "<script" not in render(mlp.manifest, mlp.manifest.files, ["<script>alert(1)</script>"])


def test_no_report_when_none_was_wanted(cli: Cli, onnx_file: Path, target: Path) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--no-report").published()
    assert not (target / "report.html").exists()
    assert "report.html" not in Artifact.open(target).manifest.files
