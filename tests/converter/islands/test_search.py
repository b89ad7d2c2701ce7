"""The search on models built to be over budget: it finds exactly the nodes and weights at fault, in few trials."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import reported
from failing import Failing, cancellation, lstm, offset, overflow, softmax
from lowered import specs

import graphs
from bf16kit.artifact.manifest import SpecEntry
from bf16kit.converter.islands import search as of_the_search
from bf16kit.converter.islands.candidates import SearchResult, merged
from bf16kit.converter.islands.search import IslandSearches, search
from bf16kit.converter.islands.switches import flop_shares
from bf16kit.converter.islands.trials import Deadline, Task, breaches_of, reference_outputs
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.plan import narrowed
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.rewrite import prepare
from bf16kit.converter.verify.certify import Certified
from bf16kit.converter.verify.measure import Drifts, Expected, Run, slice_scales
from bf16kit.drift.budget import Budget
from bf16kit.drift.metrics import OutputDrift, SampleDrift
from bf16kit.runtime import RuntimeInfo

_FAILING = (cancellation, overflow, softmax, offset, lstm)
_Build = Callable[[], Failing]


def _task(built: Failing, profile: str, **options: list[str]) -> Task:
    model = ir.from_proto(built.proto)
    inputs, outputs = specs(model.graph.inputs), specs(model.graph.outputs)
    entries = {"inputs": [*map(SpecEntry.of, inputs)], "outputs": [*map(SpecEntry.of, outputs)]}
    manifest = reported.manifest().model_copy(update={**entries, "batch_axis": None, "options": options})
    prepared = prepare(model, {})
    answers = reference_outputs(prepared.reference, manifest, built.feeds, None)
    scales = slice_scales(answers, outputs, None)
    expected = Expected(built.feeds, answers, scales, len(built.feeds))
    return Task(prepared=prepared, profile=PROFILES[profile], manifest=manifest, expected=expected, budget=Budget())


def _search(
    built: Failing, profile: str, deadline: Deadline | None = None, budget: Budget | None = None, **options: list[str]
) -> SearchResult:
    task = _task(built, profile, **options)
    return search(replace(task, deadline=deadline or Deadline(), budget=budget or Budget()), Progress())


def _found(result: SearchResult) -> tuple[frozenset[str], frozenset[str]]:
    assert not result.error
    kept = merged([result])
    return frozenset(kept.nodes), frozenset(kept.tensors)


@pytest.mark.parametrize("build", _FAILING)
def test_exactly_the_nodes_and_weights_at_fault_stay_fp32(build: _Build) -> None:
    """For the cpu profile, only the weights."""
    built = build()
    assert _found(_search(built, "cpu")) == (frozenset(), built.weights)
    result = _search(built, "cuda")
    assert _found(result) == (built.nodes, built.weights)
    assert result.complete
    assert result.entry.after <= 1 < result.entry.before
    for island in result.islands:
        assert island.breach is not None
        assert island.breach.measured > 1.5e-2 > island.with_it
        assert island.reason("cuda") == f"kept in fp32 to meet the budget of cuda; the search measured {island.worth()}"


def test_an_lstm_over_a_short_sequence_needs_no_islands() -> None:
    assert not _search(lstm(10), "cpu").islands


def test_a_product_in_fp32_keeps_its_weight_in_bf16_unless_that_is_at_fault() -> None:
    """This is the cheaper remedy. By the plan's rules, nodes between two such products become fp32 as well."""
    result = _search(offset(), "cuda", budget=Budget.parse(["relative_l2=3e-3"]))
    assert _found(result) == (frozenset({"logits", "last"}), frozenset())
    assert result.entry.bf16_bytes > 0.99
    assert result.entry.bf16_flops == 0


def test_nodes_that_the_user_requested_in_bf16_are_not_made_islands() -> None:
    result = _search(offset(), "cuda", bf16=["softmax"])
    assert "the search found no islands: drift is over budget even with all candidates in fp32" in result.error
    assert result.error.endswith("; still bf16, because of --bf16 or because they move bf16 data: softmax")


def test_sets_are_tried_on_a_few_samples_and_checked_on_all() -> None:
    """One of 41 samples overflows a product; it is among the samples that are tried."""
    built = overflow()
    calm = [{"x": feed["x"] * 1e-3} for feed in built.feeds]
    many = Failing(built.proto, [*calm * 5, built.feeds[1], *calm * 5], built.nodes, built.weights)
    assert _found(_search(many, "cuda")) == (built.nodes, built.weights)


def _drift(error: float) -> OutputDrift:
    return OutputDrift([SampleDrift(error, 0.0, error, 34.0, 0, 0, 0)])


def test_a_model_that_is_over_budget_on_each_sample_alone_is_over_budget() -> None:
    """A server judges each start by one sample. Here each is over in one of two outputs, and the means are not."""
    far, near = _drift(0.02), _drift(0.0)
    drifts: list[Drifts] = [{"a": far, "b": near}, {"a": near, "b": far}]
    assert [breach.output for breach in breaches_of(Budget(), drifts)] == ["a"]
    assert not breaches_of(Budget(), [*drifts, {"a": near, "b": near}])


@pytest.mark.parametrize("given", [0, 1])
def test_a_set_that_was_tried_on_samples_made_by_perturbation_is_judged_by_those(given: int) -> None:
    made = [{"a": replace(_drift(error), made=True)} for error in (0.02, 0.0)]
    drifts: list[Drifts] = [*made, *[{"a": _drift(0.0)}] * given]
    assert not breaches_of(Budget(), drifts)
    assert breaches_of(Budget(), made[:1])


class Steps(Progress):
    """Records the names of the steps."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def step(self, name: str, *given: Any, **more: Any) -> Iterator[Callable[[int], None]]:
        self.names.append(name)
        with super().step(name, *given, **more) as advance:
            yield advance


def _over_budget(task: Task) -> Certified:
    """Return what certifying the written graph gives: cuda is over budget."""
    info = RuntimeInfo("onnxruntime", "cpu", "cuda", "fp32", "unknown")
    runs = {"cuda": Run([{"y": _drift(0.02)} for _ in task.expected.feeds], info)}
    return Certified(task.manifest, task.expected, runs=runs, breaches={"cuda": ["over"]})


def _searches(task: Task, directory: Path, progress: Progress) -> IslandSearches:
    options = Options(source=Path("m.onnx"), target=parse_target(directory / "r" / "m" / "1"))
    return IslandSearches(task.prepared, options, progress, directory)


@pytest.mark.parametrize("within", [False, True])
def test_a_written_graph_that_stays_over_budget_gets_ever_larger_sets_and_at_last_none(
    within: bool, tmp_path: Path
) -> None:
    """The written graph sums in another order: it may be over budget although the graph of the search is ``within``."""
    built = offset()
    if within:
        built = Failing(graphs.mlp(), [{"x": graphs.values(4, 16, seed=9)}], frozenset(), frozenset())
    task, steps, found = _task(built, "cuda"), Steps(), list[set[str]]()
    searches = _searches(task, tmp_path, steps)
    for _ in range(9):
        certified = _over_budget(task)
        islands = searches.next_islands(certified)
        if islands is None:
            break
        found.append({*islands.nodes, *islands.tensors})
    *tried, withdrawn = found
    assert tried[0] >= built.nodes | built.weights
    assert len(tried) > 1
    assert all(before < after for before, after in itertools.pairwise(tried))
    assert steps.names.count("searching fp32 islands of cuda: measuring") == 2, "the second time for less of the budget"
    plan = task.plan()
    assert tried[-1] == narrowed(plan.tensors) | narrowed(plan.nodes["cuda"])
    assert not withdrawn
    assert not searches.results
    assert "did not confirm any" in certified.breaches["cuda"][-1]


class TestOutOfTime:
    """The clock advances by one at each reading, so that the search runs out of time after a given number of runs."""

    @staticmethod
    def _after(runs: float) -> Deadline:
        ticks: Iterator[int] = itertools.count()
        return Deadline(runs, lambda: float(next(ticks)))

    def test_the_clock_is_processor_time_so_that_a_busy_machine_gives_the_same_islands(self) -> None:
        assert Deadline.after(1).clock is time.process_time

    @pytest.mark.parametrize("runs", [20, 40])
    def test_a_set_that_is_known_to_suffice_is_used_and_reported_as_unfinished(self, runs: int) -> None:
        result = _search(cancellation(), "cuda", self._after(runs))
        nodes, weights = _found(result)
        assert nodes >= {"left", "right", "difference"}
        assert weights >= {"w1", "w2"}
        assert not result.complete
        assert "some may be unnecessary" in result.notes[0]

    @pytest.mark.parametrize("runs", [0, 3])
    def test_a_search_without_a_result_is_an_error_that_names_the_option(self, runs: int) -> None:
        assert "--search-minutes" in _search(cancellation(), "cuda", self._after(runs)).error

    @pytest.mark.parametrize("runs", [16, math.inf])
    def test_a_set_that_suffices_for_a_few_samples_is_used_only_if_it_does_for_all(
        self, monkeypatch: pytest.MonkeyPatch, runs: float
    ) -> None:
        """Here the few samples are small, and need no islands at all."""
        monkeypatch.setattr(of_the_search, "typical", lambda _: (0, 2))
        result = _search(overflow(), "cuda", self._after(runs))
        assert result.complete == (runs == math.inf)
        assert _found(result)[0] >= {"scale"}
        assert result.entry.after <= 1


def test_a_product_counts_its_multiplications_and_an_unknown_operator_of_that_name_its_elements() -> None:
    left, right = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("left", "right"))
    left.shape = ir.Shape([2, 5])
    domains = ("", "com.microsoft", "other")
    nodes = [ir.Node(domain, "MatMul", [left, right], name=f"n{domain}") for domain in domains]
    model = ir.Model(ir.Graph([left, right], [], nodes=nodes, opset_imports={"": 22}), ir_version=10)
    shares = flop_shares(model, {f"n{domain}": (2, 3) for domain in domains})
    assert shares == {"n": 60 / 126, "ncom.microsoft": 60 / 126, "nother": 6 / 126}
