from __future__ import annotations

from html.parser import HTMLParser

from loopback import LoopbackModel, LoopbackRegistry

from bf16kit.runtime import RuntimeInfo
from service.status_http.page import status_page

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Collects the elements, and that each is closed in its turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_an_empty_repository_says_what_to_do() -> None:
    page = status_page(LoopbackRegistry([]))
    Balanced(page)
    assert "not ready" in page
    assert "bf16-convert checkpoint" in page


def test_everything_that_comes_from_elsewhere_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    info = RuntimeInfo("onnxruntime", evil, evil, evil, "fp32", evil)
    broken = LoopbackModel(evil, state="unavailable")
    broken.reason = evil
    page = status_page(LoopbackRegistry([LoopbackModel("m" + evil, info=info), broken]))
    assert "script" not in Balanced(page).seen
    assert page.count("&lt;script&gt;") >= 6


def test_a_ready_model_shows_how_it_runs_and_what_it_did() -> None:
    page = status_page(LoopbackRegistry([LoopbackModel("echo")]))
    for expected in ("x: FP32 [batch,3]", "precision bf16-weights, accumulation fp32", "3 answered", "up to 8 rows"):
        assert expected in page


def test_why_a_profile_was_chosen_is_shown_and_escaped() -> None:
    info = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32", choice="auto: <1 ms")
    page = status_page(LoopbackRegistry([LoopbackModel("echo", info=info)]))
    assert "auto: &lt;1 ms" in page
    assert "auto:" not in status_page(LoopbackRegistry([LoopbackModel("echo")]))


def test_the_path_of_the_cpu_kernel_is_shown_where_it_runs() -> None:
    info = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32", kernel="avx2")
    page = status_page(LoopbackRegistry([LoopbackModel("echo", info=info)]))
    assert "accumulation fp32, kernel avx2" in page
