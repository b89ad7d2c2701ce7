"""The search's simulation and the written graphs agree, on a model of the shape of an OCR detector."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from converting import ONNX_ONLY, Cli
from lowered import Lowered, lower
from textdetector import pictures, text_detector

from bf16kit.drift.budget import Budget
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.runtime.ort.session import open_session
from converter.islands.candidates import bf16_alone, candidates
from converter.islands.trials import Task, Trials
from converter.plan import make_plan
from converter.plan.decisions import Islands
from converter.plan.profiles import PROFILES
from converter.rewrite import prepare
from converter.verify import measure
from converter.verify.emulate import emulation
from converter.verify.measure import Expected

FEEDS = pictures()
NOISE = -16.0  # there, ONNX Runtime's Sigmoid resolves only a few bits


class Simulated:
    """The drift that the search simulates for some candidates of ``profile`` as islands, and what is written for it."""

    def __init__(self, directory: Path, profile: str, chosen: Callable[[int], bool], logit: float = 0.0) -> None:
        proto, how = text_detector(logit), PROFILES[profile]
        prepared = prepare(ir.from_proto(proto))
        base, plan = how.base(prepared), make_plan(prepared).plan
        units = frozenset(u for number, u in enumerate(candidates(base, plan, how, {}, {})) if chosen(number))
        alone = bf16_alone(units)
        islands = Islands(dict.fromkeys(alone.nodes, ""), dict.fromkeys(alone.weights, ""))
        written = lower(directory / "1", proto, islands=islands)
        manifest = written.artifact.manifest.model_copy(update={"batch_axis": 0})
        expected = list(measure.run_all(load_reference(written.artifact), FEEDS))
        runtime = load(written.artifact, "cpu") if profile == "cpu" else _emulated(written)
        self.written = measure.drifts(expected, measure.run_all(runtime, FEEDS), written.outputs, 0, {})
        compared = Expected(FEEDS, expected, {}, len(FEEDS))
        task = Task(prepared=prepared, profile=how, manifest=manifest, expected=compared, budget=Budget())
        self.simulated = Trials(task).drifts(task.rounded(units))

    @property
    def errors(self) -> tuple[Sequence[float], Sequence[float]]:
        """The relative L2 of each sample, simulated and written."""
        simulated, written = (
            [one["y"].rows[0].relative_l2 for one in found] for found in (self.simulated, self.written)
        )
        return simulated, written


def _emulated(written: Lowered) -> OnnxRuntime:
    path = written.artifact.file("cuda.onnx")
    return OnnxRuntime(emulation(path), written.inputs, written.outputs, base_dir=path.parent)


def none(_: int) -> bool:
    return False


def every(_: int) -> bool:
    return True


def half(number: int) -> bool:
    return bool(np.random.default_rng(number).random() < 0.5)


@pytest.mark.parametrize("chosen", [none, every, half])
class TestAgreement:
    def test_emulated_cuda_has_the_same_drift_to_the_bit_if_sums_are_in_the_same_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[int], bool]
    ) -> None:
        """Without ONNX Runtime's optimisations both run the same kernels."""
        monkeypatch.setattr("bf16kit.runtime.ort.onnx.open_session", functools.partial(open_session, optimise=False))
        found = Simulated(tmp_path, "cuda", chosen)
        assert [one["y"].rows for one in found.simulated] == [one["y"].rows for one in found.written]
        assert (found.errors[0][0] > 1e-4) == (chosen is not every)

    def test_cpu_has_the_same_drift_but_for_fp32_noise(self, tmp_path: Path, chosen: Callable[[int], bool]) -> None:
        simulated, written = Simulated(tmp_path, "cpu", chosen).errors
        np.testing.assert_allclose(simulated, written, rtol=1e-2, atol=1e-6)
        assert (written[0] > 1e-4) == (chosen is not every)

    def test_emulated_cuda_has_about_the_same_drift_in_another_order_of_sums(
        self, tmp_path: Path, chosen: Callable[[int], bool]
    ) -> None:
        """The order decides which way a value near the middle of two bf16 numbers is rounded."""
        simulated, written = Simulated(tmp_path, "cuda", chosen).errors
        np.testing.assert_allclose(np.mean(simulated), np.mean(written), rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_simulation_has_the_fp32_noise_that_certification_sees(tmp_path: Path, profile: str) -> None:
    """Measured from its own fp32 outputs, the search would see none and look for islands in vain."""
    simulated, written = Simulated(tmp_path, profile, every, NOISE).errors
    assert min(written) > 0.015
    np.testing.assert_allclose(np.mean(simulated), np.mean(written), rtol=0.5)


def test_a_model_that_fp32_noise_alone_puts_over_budget_is_rejected_at_once_with_the_reason(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    source = tmp_path / "detector.onnx"
    onnx.save(text_detector(NOISE), source)
    (tmp_path / "samples").mkdir()
    for number, feed in enumerate(FEEDS):
        np.savez(tmp_path / "samples" / f"{number}.npz", **feed)  # type: ignore[arg-type]  # numpy takes arrays by keyword
    command = ("checkpoint", source, "--out", target, "--samples", tmp_path / "samples", *ONNX_ONLY)
    refused = cli(*command).refused(1, "no fp32 islands can help", "pass --samples with inputs like those")
    assert "where the error comes from" not in refused.err
