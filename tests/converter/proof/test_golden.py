"""Golden samples: kept as they were, and judged before an artifact is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from converting import ONNX_ONLY, Cli, tree
from onnx import TensorProto, helper
from safetensors.numpy import load_file

import graphs
from bf16kit.artifact import Artifact
from bf16kit.budget import Budget
from bf16kit.drift import SampleDrift
from converter.options import Options, parse_target
from converter.pipeline import convert
from converter.proof import golden
from converter.proof.measure import Drifts


def test_scalars_keep_their_shape(tmp_path: Path) -> None:
    golden.write(tmp_path / "g", {"x": np.float32(3.0) * np.ones(())}, {"y": np.ones((2, 3), np.float32).T})
    kept = load_file(tmp_path / "g")
    assert kept["input:x"].shape == ()
    assert kept["output:y"].shape == (3, 2)


def test_a_model_with_a_scalar_output_verifies(tmp_path: Path, target: Path, cli: Cli) -> None:
    """Its golden answer would have another shape than its answer, and the drift between those is infinite."""
    source = graphs.model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
            helper.make_node("ReduceSum", ["h"], ["y"], name="sum", keepdims=0),
        ],
        [graphs.edge("x", ["batch", 32])],
        [graphs.edge("y", [])],
        [graphs.initializer("w", graphs.values(32, 32))],
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY, "--budget", "relative_l2=0.1").published()
    assert "every digest matches" in cli("verify", target).published().out


def _selecting(tmp_path: Path, rows: Sequence[Sequence[int]]) -> tuple[str | Path, ...]:
    """A conversion of a model of as many outputs as each of ``rows`` has entries, a sample per element of ``rows``; its
    budget is still to be said.

    A sample's entry says which row of a weight that output is; rounding changes row 0 alone.
    """
    weight = np.full((32, 32), 1.0, np.float32)
    weight[0] = 1 + 2.0**-8.5
    names = range(len(rows[0]))
    source = graphs.model(
        [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"], name=f"product{i}") for i in names],
        [graphs.edge(f"x{i}", ["batch", 32], TensorProto.FLOAT) for i in names],
        [graphs.edge(f"y{i}", ["batch", 32]) for i in names],
        [graphs.initializer(f"w{i}", weight * np.float32(1 + i)) for i in names],
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    (tmp_path / "samples").mkdir()
    for number, chosen in enumerate(rows):
        feed = {f"x{i}": np.eye(32, dtype=np.float32)[[row]] for i, row in enumerate(chosen)}
        np.savez(tmp_path / "samples" / f"{number:02}.npz", **feed)  # type: ignore[arg-type]  # arrays by keyword
    convert = ("checkpoint", tmp_path / "m.onnx", *ONNX_ONLY, "--samples", tmp_path / "samples", "--profile", "cpu")
    return (*convert, "--no-search", "--budget")


def test_a_sample_that_rounding_hits_hard_is_not_what_a_server_judges_a_good_model_by(
    tmp_path: Path, target: Path, cli: Cli
) -> None:
    """The mean of fifty samples is within budget, the first of them is not."""
    convert = _selecting(tmp_path, [[0], *[[1]] * 49])
    done = cli(*convert, "relative_l2=1e-3", "--out", target).published()
    assert "note: the golden samples, on which a server checks each start, are sample 1:" in done.out
    assert np.argmax(Artifact.open(target).golden().inputs["x0"]) == 1
    cli("verify", target).published()
    within = cli(*convert, "relative_l2=1", "--out", target.with_name("2")).published()
    assert "golden samples" not in within.out
    assert np.argmax(Artifact.open(target.with_name("2")).golden().inputs["x0"]) == 0


def test_a_model_that_no_sample_would_let_a_server_call_ready_is_not_published(
    tmp_path: Path, target: Path, cli: Cli
) -> None:
    """The mean is within budget for either output; of each sample, one output is over it."""
    done = cli(*_selecting(tmp_path, [[0, 1], [1, 0], [0, 1], [1, 0]]), "relative_l2=2e-3", "--out", target)
    done.refused(1, "profile cpu, output 'y0': relative_l2", "on the golden samples alone")
    assert not target.exists()


def test_the_golden_sample_is_the_first_that_all_profiles_answered_within_budget() -> None:
    budget = Budget({"relative_l2": 1.0})

    def drifts(*errors: float) -> list[Drifts]:
        return [{"y": [SampleDrift(error, 0.0, 0.0, 0.0, 0, 0, 0)]} for error in errors]

    cpu = dict(enumerate(drifts(2.0, 0.5, 0.5, 0.5, 0.5)))
    cuda = dict(enumerate(drifts(0.5, 0.5, 2.0, 0.5, 0.5)))
    sparse = dict(zip((0, 2, 4), drifts(0.5, 0.5, 0.5), strict=True))  # not every profile runs all
    assert golden.choose(budget, []) == 0
    assert golden.choose(budget, [cpu]) == 1
    assert golden.choose(budget, [cuda]) == 0
    assert golden.choose(budget, [cpu, cuda, sparse]) == 4
    assert golden.choose(Budget({"relative_l2": 0.1}), [cpu, cuda]) == 0


def _flat(tmp_path: Path, firsts: Sequence[float]) -> Path:
    """A product whose weight bf16 holds exactly, and a sample for each of ``firsts`` that consists of it alone."""
    weight = np.sign(graphs.values(32, 32))
    source = graphs.model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        [graphs.edge("x", ["batch", 32])],
        [graphs.edge("y", ["batch", 32])],
        [graphs.initializer("w", weight)],
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    (tmp_path / "samples").mkdir()
    for number, first in enumerate(firsts):
        np.savez(tmp_path / "samples" / f"{number:02}.npz", x=np.full((1, 32), first, np.float32))
    return tmp_path / "m.onnx"


def _with_optional(source: Path, target: Path) -> Artifact:
    options = Options(
        source=source,
        target=parse_target(target),
        samples=str(source.parent / "samples"),
        formats=("onnx",),
        profiles=("cpu",),
        optional=("cpu-bf16",),
        budget=Budget.parse(["relative_l2=1e-3"]),
        search=False,
        report=False,
    )
    return convert(options).artifact


_ROUNDED = 1 + 2.0**-9  # of which bf16 makes 1


def test_a_profile_that_nobody_asked_for_has_golden_samples_of_its_own_where_it_needs_them(
    tmp_path: Path, target: Path, cli: Cli
) -> None:
    """The others are judged by what they would be judged by without it."""
    artifact = _with_optional(_flat(tmp_path, [_ROUNDED, *[1.0] * 20]), target)
    own = artifact.manifest.profiles["cpu-bf16"].golden
    assert own == "golden.cpu-bf16.safetensors"
    assert artifact.golden().inputs["x"][0, 0] == artifact.golden("cpu").inputs["x"][0, 0] == np.float32(_ROUNDED)
    assert artifact.golden("cpu-bf16").inputs["x"][0, 0] == 1
    assert " cpu-bf16 " in cli("verify", target).published().out


def test_golden_samples_that_all_profiles_answer_are_kept_once(tmp_path: Path, target: Path) -> None:
    artifact = _with_optional(_flat(tmp_path, [1.0, _ROUNDED, *[1.0] * 20]), target)
    assert artifact.manifest.profiles["cpu-bf16"].golden is None
    assert [name for name in tree(target) if name.startswith("golden")] == ["golden.safetensors"]


def test_a_profile_that_nobody_asked_for_is_left_out_where_no_sample_would_let_a_server_call_it_ready(
    tmp_path: Path, target: Path
) -> None:
    artifact = _with_optional(_flat(tmp_path, [_ROUNDED, _ROUNDED]), target)
    assert [*artifact.manifest.profiles] == ["cpu"]
    assert [name for name in tree(target) if "bf16." not in name and ("golden" in name or "cpu" in name)] == [
        "cpu.onnx",
        "golden.safetensors",
    ]


def test_an_artifact_without_a_residual_says_that_it_cannot_be_restored(tmp_path: Path, target: Path, cli: Cli) -> None:
    (tmp_path / "m.onnx").write_bytes(graphs.mlp((32, 32)).SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY, "--no-residual").published()
    cli("restore", target, "--out", tmp_path / "r.safetensors").refused(2, "--no-residual")
    assert not (tmp_path / "r.safetensors").exists()


def test_weights_listed_among_the_inputs_are_not_inputs(tmp_path: Path, target: Path, cli: Cli) -> None:
    """Files of IR version 3, which model zoos are full of, list every weight as an input."""
    source = graphs.mlp((32, 32))
    source.ir_version = 3
    source.graph.input.extend(graphs.edge(t.name, list(t.dims)) for t in source.graph.initializer)
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    done = cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY).published()
    assert "converted" in done.out


def test_constants_outside_the_directory_of_a_model_are_refused(tmp_path: Path, target: Path, cli: Cli) -> None:
    source = graphs.constant_nodes()
    constant = next(a.t for node in source.graph.node for a in node.attribute if a.HasField("t"))
    graphs.refer(constant, "../elsewhere.bin")
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere.bin").write_bytes(bytes(1 << 16))
    (tmp_path / "model" / "m.onnx").write_bytes(source.SerializeToString())
    refused = cli("checkpoint", tmp_path / "model" / "m.onnx", "--out", target, *ONNX_ONLY)
    refused.refused(2, "../elsewhere.bin", "outside the model's directory")
