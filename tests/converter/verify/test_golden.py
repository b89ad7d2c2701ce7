"""Golden samples: stored unchanged, and checked against the budget before an artifact is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from converting import ONNX_ONLY, Cli, tree
from onnx import TensorProto, helper

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.budget import Budget
from converter.convert import convert
from converter.options import Options, parse_target


@pytest.mark.long
def test_a_model_with_a_scalar_output_verifies(tmp_path: Path, target: Path, cli: Cli) -> None:
    """If the stored golden output had another shape than the model's output, the drift would be infinite."""
    source = graphs.parsed(
        "(float[batch, 32] x) => (float y) { [product] h = MatMul (x, w) [sum] y = ReduceSum <keepdims = 0> (h) }",
        w=graphs.values(32, 32),
    )
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, *ONNX_ONLY).published()
    assert "every digest matches" in cli("verify", target).published().out


def _selecting(tmp_path: Path, rows: Sequence[Sequence[int]]) -> tuple[str | Path, ...]:
    """Return the arguments of a conversion up to ``--budget``; the caller appends the budget's value.

    There is one sample for each entry of ``rows``, and the model has one output for each element of an entry. The
    element is the row of the weight that this output shows. Rounding changes row 0 alone.
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
    return (*convert, "--no-search", "--budget", "slice_error=none", "--budget")  # the outputs vary by rounding alone


@pytest.mark.long
def test_a_golden_sample_over_budget_is_replaced_by_one_within_budget(tmp_path: Path, target: Path, cli: Cli) -> None:
    """The mean of fifty samples is within budget but the first sample is not, so the second becomes the golden one."""
    convert = _selecting(tmp_path, [[0], *[[1]] * 49])
    done = cli(*convert, "relative_l2=1e-3", "--out", target).published()
    assert "note: the golden samples, on which a server checks each start, are sample 1:" in done.out
    assert np.argmax(Artifact.open(target).golden().inputs["x0"]) == 1
    cli("verify", target).published()
    within = cli(*convert, "relative_l2=1", "--out", target.with_name("2")).published()
    assert "golden samples" not in within.out
    assert np.argmax(Artifact.open(target.with_name("2")).golden().inputs["x0"]) == 0


@pytest.mark.long
def test_a_model_without_a_golden_sample_within_budget_is_not_published(tmp_path: Path, target: Path, cli: Cli) -> None:
    """The mean is within budget for both outputs, but each sample has one output over budget."""
    done = cli(*_selecting(tmp_path, [[0, 1], [1, 0], [0, 1], [1, 0]]), "relative_l2=2e-3", "--out", target)
    done.refused(1, "profile cpu, output 'y0': relative_l2", "on the golden samples alone")
    assert not target.exists()


def _flat(tmp_path: Path, firsts: Sequence[float]) -> Path:
    """Write a product whose weight is exact in bf16, and a sample filled with each of ``firsts``; return its path."""
    source = graphs.parsed(
        "(float[batch, 32] x) => (float[batch, 32] y) { [product] y = MatMul (x, w) }", w=np.sign(graphs.values(32, 32))
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
        budget=Budget.parse(["relative_l2=1e-3", "slice_error=none"]),  # the outputs do not vary
        search=False,
        report=False,
    )
    return convert(options).artifact


_ROUNDED = 1 + 2.0**-9  # bf16 rounds it to 1


@pytest.mark.long
def test_an_optional_profile_has_its_own_golden_samples_if_it_needs_them(
    tmp_path: Path, target: Path, cli: Cli
) -> None:
    """The other profiles keep the golden samples that they would have without it."""
    artifact = _with_optional(_flat(tmp_path, [_ROUNDED, *[1.0] * 20]), target)
    own = artifact.manifest.profiles["cpu-bf16"].golden
    assert own == "golden.cpu-bf16.safetensors"
    assert artifact.golden().inputs["x"][0, 0] == artifact.golden("cpu").inputs["x"][0, 0] == np.float32(_ROUNDED)
    assert artifact.golden("cpu-bf16").inputs["x"][0, 0] == 1
    assert " cpu-bf16 " in cli("verify", target).published().out


@pytest.mark.long
def test_an_optional_profile_without_a_golden_sample_within_budget_is_left_out(tmp_path: Path, target: Path) -> None:
    artifact = _with_optional(_flat(tmp_path, [_ROUNDED, _ROUNDED]), target)
    assert [*artifact.manifest.profiles] == ["cpu"]
    assert [name for name in tree(target) if "bf16." not in name and ("golden" in name or "cpu" in name)] == [
        "cpu.onnx",
        "golden.safetensors",
    ]
