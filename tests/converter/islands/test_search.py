"""The search on models built to be over budget: it finds exactly the nodes and weights at fault."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir
import pytest
from failing import Failing, cancellation, lstm, offset, overflow, softmax
from lowered import specs

from bf16kit.artifact.manifest import Plan
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import OutputDrift, SampleDrift
from converter.islands import search as of_the_search
from converter.islands.judged import BudgetJudge, breaches_of
from converter.islands.ranking import Group, Unit
from converter.islands.result import SearchResult
from converter.islands.search import Task, search
from converter.islands.trials import Deadline, Edges, Trials, typical
from converter.plan import make_plan
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES, Profile
from converter.process.progress import SilentProgress
from converter.rewrite import prepare
from converter.source import Feeds
from converter.verify.measure import Drifts, Expected, run_all, slice_scales
from converter.verify.running import open_fp32_graph

_FAILING = (cancellation, overflow, softmax, offset, lstm)
_Build = Callable[[], Failing]


def _search(
    built: Failing,
    profile: str,
    deadline: Deadline | None = None,
    budget: Budget | None = None,
    bf16: Sequence[str] = (),
    ranking: Sequence[Group] = (),
) -> SearchResult:
    model = ir.from_proto(built.proto)
    edges = Edges(specs(model.graph.inputs), specs(model.graph.outputs), None)
    prepared = prepare(model, {})

    def replan(islands: Islands, chosen: Profile) -> Plan:
        return make_plan(prepared, islands=islands, profiles=[chosen.name], bf16=bf16).plan

    reference = open_fp32_graph(prepared.reference, edges.inputs, edges.outputs)
    task = Task(
        prepared,
        PROFILES[profile],
        replan,
        Islands(),
        edges,
        _expected(list(run_all(reference, built.feeds)), built.feeds, edges),
        budget or Budget(),
        deadline or Deadline.after(5),
        ranking=ranking,
    )
    return search(task, SilentProgress())


def _found(result: SearchResult) -> tuple[frozenset[str], frozenset[str]]:
    assert not result.error
    kept = result.as_islands()
    return frozenset(kept.nodes), frozenset(kept.tensors)


@pytest.mark.parametrize("build", _FAILING)
def test_exactly_the_nodes_and_weights_at_fault_stay_fp32(build: _Build) -> None:
    built = build()
    result = _search(built, "cuda")
    assert _found(result) == (built.nodes, built.weights)
    assert result.complete
    assert result.drift_now <= 1 < result.drift_before


@pytest.mark.parametrize("build", _FAILING)
def test_for_the_cpu_profile_only_the_weights_at_fault_stay_fp32(build: _Build) -> None:
    built = build()
    assert _found(_search(built, "cpu")) == (frozenset(), built.weights)


@pytest.mark.parametrize("build", _FAILING)
def test_the_same_model_gives_the_same_result(build: _Build) -> None:
    assert _search(build(), "cuda") == _search(build(), "cuda")


def test_each_island_states_its_worth() -> None:
    result = _search(offset(), "cuda")
    for island in result.islands:
        assert island.bound == "relative_l2"
        assert island.without is not None
        assert island.with_it is not None
        assert island.without > 1.5e-2 > island.with_it
        assert island.reason("cuda") == (
            f"kept in fp32: cuda is over budget without it (relative_l2 {island.without:.3g} → {island.with_it:.3g})"
        )
    (sentence,) = result.sentences()
    assert "profile cuda was over budget; 2 islands in fp32 brought it within budget" in sentence
    assert "of the arithmetic" in sentence


def test_an_lstm_over_a_short_sequence_needs_no_islands() -> None:
    assert not _search(lstm(10), "cpu").islands


def test_a_product_in_fp32_keeps_its_weight_in_bf16_unless_that_is_at_fault() -> None:
    """This is the cheaper remedy. By the plan's rules, nodes between two such products become fp32 as well."""
    result = _search(offset(), "cuda", budget=Budget.parse(["relative_l2=3e-3"]))
    assert _found(result) == (frozenset({"logits", "last"}), frozenset())
    assert result.bytes_now == result.bytes_before
    assert result.flops_now == 0 < result.flops_before


def test_nodes_that_the_user_requested_in_bf16_are_not_made_islands() -> None:
    result = _search(offset(), "cuda", bf16=["softmax"])
    assert "the search found no islands: drift is over budget even with all candidates in fp32" in result.error
    assert result.error.endswith("; still bf16, because of --bf16 or because they move bf16 data: softmax")


def _expected(outputs: list[Feeds], feeds: Sequence[Feeds], edges: Edges) -> Expected:
    return Expected(feeds, outputs, slice_scales(outputs, edges.outputs, None), len(feeds))


def test_sets_are_tried_on_a_few_samples_and_checked_on_all() -> None:
    """One of 41 samples overflows a product; it is among the samples that are tried."""
    built = overflow()
    calm = [{"x": feed["x"] * 1e-3} for feed in built.feeds]
    many = Failing(built.proto, [*calm * 5, built.feeds[1], *calm * 5], built.nodes, built.weights)
    assert _found(_search(many, "cuda")) == (built.nodes, built.weights)


def test_a_model_that_is_over_budget_on_each_sample_alone_is_over_budget() -> None:
    """A server judges each start by one sample. Here each is over in one of two outputs, and the means are not."""
    far, near = (OutputDrift([SampleDrift(error, 0.0, error, 34.0, 0, 0, 0)]) for error in (0.02, 0.0))
    drifts: list[Drifts] = [{"a": far, "b": near}, {"a": near, "b": far}]
    assert [breach.output for breach in breaches_of(Budget(), drifts)] == ["a"]
    assert not breaches_of(Budget(), [*drifts, {"a": near, "b": near}])


def test_a_set_that_is_clearly_over_on_the_first_samples_is_not_tried_on_the_others() -> None:
    units = {name: Unit("node", name, "Add", 0.1) for name in "ab"}
    tried: list[tuple[int, ...]] = []

    def drifts(chosen: frozenset[Unit], samples: tuple[int, ...]) -> list[Drifts]:
        tried.append(samples)
        error = 0.0149 if units["a"] in chosen else 0.02
        return [{"y": OutputDrift([SampleDrift(error, 0.0, error, 0.0, 0, 0, 0)])} for _ in samples]

    judge = BudgetJudge(Budget(), range(4), drifts)
    assert judge.within_budget(frozenset(units.values()))
    assert not judge.within_budget(frozenset({units["b"]}))
    assert tried == [(0,), (1, 2, 3), (0,)]


def test_the_time_of_a_search_is_processor_time() -> None:
    """On a busy machine the process waits, and has as much time as on a quiet one."""
    assert Deadline.after(1).clock is time.process_time


def test_samples_to_try_are_spaced_from_the_best_to_the_worst() -> None:
    def drift(error: float) -> Drifts:
        return {"y": OutputDrift([SampleDrift(error, 0.0, 0.0, 0.0, 0, 0, 0)])}

    chosen = typical([drift(float(i * 7 % 100)) for i in range(100)])
    errors = sorted(i * 7 % 100 for i in chosen)
    assert len(chosen) <= 16
    assert (errors[0], errors[-1]) == (0, 99)
    assert max(b - a for a, b in itertools.pairwise(errors)) <= 8
    assert typical([drift(1.0)] * 3) == (0, 1, 2)


def test_a_second_search_does_not_rank_the_candidates_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _search(softmax(), "cuda")
    tighter = Budget().tightened(0.9)
    expected = _search(softmax(), "cuda", budget=tighter)

    def ranked_again(*_: object) -> float:
        raise AssertionError("ranked again")

    monkeypatch.setattr(Trials, "error", ranked_again)
    assert _search(softmax(), "cuda", budget=tighter, ranking=first.ranking) == expected
    with pytest.raises(AssertionError, match="ranked again"):  # other candidates
        _search(softmax(), "cpu", ranking=first.ranking)


class TestOutOfTime:
    """The clock advances by one at each reading, so that the search runs out of time after a given number of runs."""

    @staticmethod
    def _after(runs: int) -> Deadline:
        ticks: Iterator[int] = itertools.count()
        return Deadline(float(runs), lambda: float(next(ticks)))

    def test_a_set_that_is_known_to_suffice_is_used_and_reported_as_unfinished(self) -> None:
        found = [_search(cancellation(), "cuda", self._after(runs)) for runs in (20, 40)]
        for result in found:
            nodes, weights = _found(result)
            assert nodes >= {"left", "right", "difference"}
            assert weights >= {"w1", "w2"}
            assert not result.complete
            assert "some may be unnecessary" in result.notes[0]

    def test_only_islands_that_were_tested_for_removal_state_their_worth(self) -> None:
        """Some of the islands state it, the same as a search with enough time."""
        found = _search(cancellation(), "cuda", self._after(66))
        assert not found.complete
        worth = {island.name: island.worth() for island in found.islands if island.worth()}
        whole = {island.name: island.worth() for island in _search(cancellation(), "cuda").islands}
        assert 0 < len(worth) < len(found.islands)
        assert worth.items() <= whole.items()

    @pytest.mark.parametrize("runs", [0, 3])
    def test_a_search_without_a_result_is_an_error_that_names_the_option(self, runs: int) -> None:
        assert "--search-minutes" in _search(cancellation(), "cuda", self._after(runs)).error

    def test_a_set_that_suffices_for_a_few_samples_is_used_only_if_it_does_for_all(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here the few samples are small, and need no islands at all."""
        monkeypatch.setattr(of_the_search, "typical", lambda _: (0, 2))
        for runs in (28, 1000):
            result = _search(overflow(), "cuda", self._after(runs))
            assert result.complete == (runs == 1000)
            assert _found(result)[0] >= {"scale"}
            assert result.drift_now <= 1

    def test_a_deadline_that_is_not_reached_changes_nothing(self) -> None:
        assert _search(cancellation(), "cuda", self._after(100_000)) == _search(cancellation(), "cuda")
