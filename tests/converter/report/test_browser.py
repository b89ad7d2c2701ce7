"""The report in a real browser: headless Chromium, in light and dark, at the widths of a desktop and a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import browser
import pytest
import reported
from browser import Browser

from bf16kit.artifact.manifest import SpecEntry
from bf16kit.converter.report.charts import DOTS
from bf16kit.converter.report.page import render

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")

Scheme = Literal["light", "dark"]
PHONE, DESK = 360, 1200


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = browser.find()
    assert binary is not None
    with Browser(binary, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a report with everything that a report can show; cuda is over budget."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    manifest = reported.manifest(over=True)
    path.write_text(render(manifest, manifest.files, ["a note"], reported.measurements(over=True)))
    return path


@pytest.mark.long
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_loads_without_requests_fits_the_window_and_is_readable(
    chromium: Browser, page: Path, tmp_path: Path, scheme: Scheme, width: int
) -> None:
    chromium.emulate_display(scheme, width)
    seen = chromium.open(page)
    assert seen.requests == []
    assert seen.complaints == []
    assert chromium.evaluate("document.documentElement.scrollWidth") == width
    ratio, text = chromium.least_contrast()
    assert ratio >= 4.5, text
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 3 * 128) == (scheme == "dark")
    chromium.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_plots_have_as_many_dots_as_they_say(chromium: Browser, page: Path) -> None:
    chromium.emulate_display("light", DESK)
    chromium.open(page)
    dots = [
        chromium.evaluate(f"document.querySelectorAll('svg[aria-labelledby^={key}] use').length")
        for key in ("samples0", "samples1", "layers0", "layers1")
    ]
    assert dots == [DOTS, DOTS, 120, 120]
    drawn = "[...document.querySelectorAll('svg use')].every(d => d.getBoundingClientRect().width > 3)"
    assert chromium.evaluate(drawn)
    inside = """[...document.querySelectorAll('svg')].every(svg => {
      const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll('text, use, path:not(defs path)')].every(e => {
        const own = e.getBoundingClientRect();
        return own.left >= box.left - 2 && own.right <= box.right + 2 && own.top >= box.top - 2
          && own.bottom <= box.bottom + 2; }); })"""
    for width in (DESK, PHONE):
        chromium.emulate_display("light", width)
        assert chromium.evaluate(inside), width


def test_the_report_is_usable_with_a_screen_reader_a_keyboard_and_a_printer(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    assert chromium.evaluate("document.documentElement.lang") == "en"
    named = "[...document.querySelectorAll('svg')].every(s => s.querySelector('title') && s.querySelector('desc'))"
    assert chromium.evaluate(named)
    told = "[...document.querySelectorAll('table')].every(t => t.caption && t.querySelector('thead th[scope=col]'))"
    assert chromium.evaluate(told)
    assert chromium.evaluate("[...document.querySelectorAll('.scroll')].every(d => d.tabIndex === 0 && d.ariaLabel)")
    ids = "(ids => new Set(ids).size === ids.length)([...document.querySelectorAll('[id]')].map(e => e.id))"
    assert chromium.evaluate(ids)
    headings = chromium.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => h.tagName)")
    assert headings[0] == "H1"
    assert "H3" not in headings
    assert chromium.pdf().startswith(b"%PDF")


def test_a_very_long_hostile_name_breaks_nothing(chromium: Browser, tmp_path: Path) -> None:
    hostile = "<script>document.title = 'obeyed'</script>" + "x" * 400
    found = reported.manifest()
    entry = found.drift["cpu"]
    drift = {"cpu": entry.model_copy(update={"outputs": {hostile: entry.outputs["logits"]}})}
    outputs = [SpecEntry(name=hostile, dtype="float32", shape=["batch", hostile])]
    found = found.model_copy(update={"model": hostile, "drift": drift, "outputs": outputs})
    path = tmp_path / "report.html"
    path.write_text(render(found, found.files, [hostile], reported.measurements()))
    chromium.emulate_display("light", PHONE)
    assert chromium.open(path).complaints == []
    assert chromium.evaluate("document.title").startswith("<script>")
    assert chromium.evaluate("document.documentElement.scrollWidth") == PHONE
