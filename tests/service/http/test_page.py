from __future__ import annotations

import json
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import statusviews
from loopback import LoopbackModel, LoopbackRegistry
from statusviews import look_at, recent, running, server

from bf16kit.runtime import RuntimeInfo
from service.contract import GATE_FAILED
from service.http.page import MOST_SECTIONS, status_page
from service.http.views import ModelView, StatusReader
from service.telemetry.history import History
from service.telemetry.metrics import Metrics
from service.telemetry.quantiles import Durations

VOID = {"meta", "br", "link"}
EVIL = "\"'><script>alert(1)</script>"


class Balanced(HTMLParser):
    """Collects the elements and checks that they are closed in order; an element that ends in ``/>`` is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_an_empty_repository_says_what_to_do() -> None:
    page = status_page(look_at())
    Balanced(page)
    assert "Not ready: there are no models" in page
    assert "bf16-convert checkpoint" in page


def test_all_text_from_models_is_escaped() -> None:
    info = RuntimeInfo("onnxruntime", EVIL, EVIL, EVIL, "fp32", EVIL, EVIL, choice=EVIL)
    broken = LoopbackModel(EVIL, state="unavailable")
    broken.reason = EVIL
    well = LoopbackModel("m" + EVIL, info=info)
    well.golden, well.budget = EVIL, {EVIL: 1.0}
    page = status_page(look_at(well, broken))
    assert "script" not in Balanced(page).seen
    assert page.count("&lt;script&gt;") >= 10


def test_names_of_outputs_metrics_codes_and_reasons_are_escaped() -> None:
    seen = recent(output=EVIL)
    object.__setattr__(seen, "ratios", {EVIL: {EVIL: 0.5}})
    object.__setattr__(seen.total, "codes", {EVIL: 1})
    object.__setattr__(seen.total, "rejected", {EVIL: 1})
    specs = running(inputs=(EVIL,), outputs=(EVIL,), accumulation=EVIL, backend=EVIL)
    view = server([ModelView("m", 1, EVIL, EVIL, specs, seen)], version=EVIL, at=f"T{EVIL}")
    object.__setattr__(view.door, "total", {EVIL: 1})
    page = status_page(view)
    assert "script" not in Balanced(page).seen
    assert page.count("&lt;script&gt;") >= 11


def test_a_full_page_is_well_formed_and_has_no_active_content() -> None:
    seen = Balanced(status_page(statusviews.everything()))
    assert not seen.seen & {"script", "iframe", "object", "img", "form"}
    assert not {name for name in seen.attributes if name.startswith("on") or name in ("style", "src")}


@pytest.mark.parametrize(
    "words",
    [
        "x: FP32 [batch,3]",
        "onnxruntime on cpu",
        "<dd>bf16-weights</dd>",
        "fp32: measured on this device when the model was loaded",
        "golden samples within budget (y relative_l2 0.0017)",
        "up to 8 rows, waiting up to 2\u00a0ms for more; one batch at once",
        "Ready: 1 model answers",
    ],
)
def test_a_ready_model_shows_how_it_runs(words: str) -> None:
    assert words in status_page(look_at(LoopbackModel("echo")))


def test_a_failed_golden_gate_is_highlighted() -> None:
    model = LoopbackModel("echo")
    assert "<dd><span>golden samples within budget" in status_page(look_at(model))
    model.golden = f"{GATE_FAILED} 2026-01-01T00:00:00+00:00: golden samples are over the drift budget"
    assert f"<span class=over>{GATE_FAILED} 2026" in status_page(look_at(model))


def test_why_a_profile_was_chosen_is_shown() -> None:
    info = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32", choice="auto: <1 ms")
    assert "<dd>cpu; auto: &lt;1 ms</dd>" in status_page(look_at(LoopbackModel("echo", info=info)))
    assert "auto:" not in status_page(look_at(LoopbackModel("echo")))


def test_the_path_of_the_cpu_kernel_is_shown_where_it_runs() -> None:
    info = RuntimeInfo("onnxruntime", "cpu", "cpu", "bf16-weights", "fp32", kernel="avx2")
    assert "<dt>CPU kernel</dt><dd>avx2</dd>" in status_page(look_at(LoopbackModel("echo", info=info)))
    assert "<dt>CPU kernel</dt><dd>none</dd>" in status_page(look_at(LoopbackModel("echo")))


def test_models_that_are_not_ready_come_first_with_their_reasons() -> None:
    page = status_page(statusviews.everything())
    assert "Not ready: 2 of 5 models do not answer" in page
    verdict = page[page.index("<section") : page.index("</section>")]
    assert '<a href="#m4">vision ·\u00a0version\u00a02</a>: unavailable: golden samples are over' in verdict
    assert '<a href="#m3">vision ·\u00a0version\u00a01</a>: loading' in verdict
    assert '<a href="#m1">minilm ·\u00a0version\u00a02</a>: drift is 131\u00a0% of its budget' in verdict
    assert 'id="m4"' in page


def test_a_server_that_loads_is_not_shown_as_one_that_failed() -> None:
    loads = [ModelView("a", 1, "loading", "loading"), ModelView("b", 1, "ready", "", running())]
    page = status_page(server(loads))
    assert "Loading: 1 of 2 models does not answer yet" in page
    assert 'class="verdict wait"' in page
    assert "<title>bf16-serve: loading</title>" in page
    assert "b3261e" not in page[: page.index("<style>")]
    failed = status_page(server([*loads, ModelView("c", 1, "unavailable", "no file")]))
    assert "Not ready: 2 of 3 models do not answer" in failed
    assert 'class="verdict bad"' in failed


def test_a_ready_server_counts_only_models_that_answer() -> None:
    """A version beside one that serves does not make the server unready."""
    well = ModelView("m", 1, "ready", "", running())
    loads = status_page(server([well, ModelView("m", 2, "loading", "loading")], ready=True))
    assert "Ready: 1 of 2 models answers" in loads
    assert 'class="verdict wait"' in loads
    failed = status_page(server([well, well, ModelView("m", 2, "unavailable", "a digest is wrong")], ready=True))
    assert "Ready: 2 of 3 models answer" in failed
    assert 'class="verdict bad"' in failed
    assert "2 of 3</dd>" in failed or ">2 of 3<" in failed


def test_the_page_shows_the_servers_version_ports_and_workers() -> None:
    page = status_page(statusviews.everything())
    for words in ("Version 1.2.3, gRPC on port 8001, 4 workers,", "on port 8002", "03:04:05 UTC</time>"):
        assert words in page
    assert "worker" not in status_page(look_at(LoopbackModel("echo")))


def test_drift_over_budget_is_shown_for_a_ready_server() -> None:
    page = status_page(server([ModelView("m", 1, "ready", "", running(), recent(ratio=2.0))]))
    assert "Ready: 1 model answers, and 1 model over the drift budget" in page
    assert 'class="verdict bad"' in page
    within = status_page(server([ModelView("m", 1, "ready", "", running(), recent(ratio=1.0))]))
    assert 'class="verdict"' in within


def test_a_stopping_server_is_shown_as_not_ready_while_its_models_are() -> None:
    registry = LoopbackRegistry([LoopbackModel("echo")])
    registry.draining = True
    page = status_page(StatusReader(registry, History(lambda: Metrics().samples([]))).snapshot())
    assert "Not ready: every model is ready, but the server is starting or stopping" in page


def test_the_page_shows_the_numbers_of_the_view() -> None:
    page = status_page(server([ModelView("m", 1, "ready", "", running(), recent())]))
    for words in (
        "134 rows/s, mean batch 4.22; 0.103 rejected or failed per second",
        "p50 9\u00a0ms, p90 21.7\u00a0ms",
        "5 in flight; wait p99 15.6\u00a0ms",
        "2,600 samples measured",
        '<td class="number">12,900</td><td class="number">88,000</td>',
        "<code>queue_full</code>",
        "up for 1\u00a0d 2\u00a0h, seen at",
        "Rejected before reaching a model: 13",
    ):
        assert words in page, words


def test_a_percentile_beyond_the_last_bucket_is_shown_as_over_it() -> None:
    seen = replace(recent(), request=Durations(10, 14.0, 0.5, 10.0, 10.0))
    page = status_page(server([ModelView("m", 1, "ready", "", running(), seen)]))
    assert "p50 500\u00a0ms, p90 over 10\u00a0s" in page
    assert '<td class="number">14\u00a0s</td>' in page


def test_recent_drift_is_shown_in_the_units_of_its_budget() -> None:
    page = status_page(server([ModelView("m", 1, "ready", "", running(), recent(ratio=0.5))]))
    row = page[page.index('<th scope="row">relative_l2</th>') :]
    assert row[: row.index("</tr>")].count("0.0075") == 1


def test_a_page_refreshes_itself_only_on_request() -> None:
    assert "http-equiv" not in status_page(look_at())
    assert '<meta http-equiv="refresh" content="10">' in status_page(look_at(), refreshing=True)


def test_a_page_of_two_hundred_models_is_bounded_in_size_and_time() -> None:
    view = statusviews.crowd(200)
    begun = time.process_time()
    page = status_page(view)
    took = time.process_time() - begun
    assert len(page.encode()) < 1_000_000
    assert page.count("<section id=") == MOST_SECTIONS
    assert page.count('<tr><th scope="row">') > 200
    assert took < 1.0  # 40 ms on an otherwise idle machine


def test_models_with_problems_are_shown_even_among_many_models() -> None:
    calm = [ModelView(f"m{at:03}", 1, "ready", "", running()) for at in range(MOST_SECTIONS + 50)]
    broken = ModelView("x", 1, "unavailable", "it is broken")
    drifting = ModelView("y", 1, "ready", "", running(), recent(ratio=3.0))
    page = status_page(server([*calm, broken, drifting]))
    assert "it is broken</p>" in page
    assert ">x ·\u00a0version\u00a01</a>: unavailable" in page
    assert ">y ·\u00a0version\u00a01</a>: drift is" in page
    assert "52 more models" in page


def test_the_list_of_problems_is_limited() -> None:
    page = status_page(server([ModelView(f"m{at}", 1, "unavailable", "x" * 1000) for at in range(1000)]))
    assert "<li>and 980 more</li>" in page
    assert page.count("<li><span") == 20
    assert len(page) < 1_000_000


def test_the_view_is_json_for_programs() -> None:
    seen = json.loads(statusviews.everything().as_json())
    assert [model["state"] for model in seen["models"]] == ["ready", "ready", "ready", "loading", "unavailable"]
    assert seen["models"][0]["recent"]["request"]["p99"] == 0.0417
