"""``bf16-convert recover`` with Lightning, on a model to which bf16 is costly: its results, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recovering
import torch
from converting import SUPPORT, Outcome, tree
from forked import forked
from safetensors.numpy import load_file
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.recoveryentries import RecoveryEntry

pytestmark = pytest.mark.sources

ROOT = SUPPORT.parents[1]
SHIFTED = ("--model", "recovering:Shifted", "--input", "x:float32:batch,16")
CHEAP = ("--format", "onnx", "--profile", "cpu", "--device", "cpu")
Recover = Callable[..., Outcome]


@pytest.fixture(scope="session")
def command(environment: Callable[[str], Path]) -> list[str]:
    return [str(environment("lightning")), "-m", "converter.cli"]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(SUPPORT)))}


@pytest.fixture(scope="session")
def alone(command: list[str]) -> Recover:
    """Return a function that runs a command line in the environment with Lightning, in a fresh process."""

    def run(*arguments: str | Path, within: Sequence[str] = ()) -> Outcome:
        done = subprocess.run(
            [*within, *command, *map(str, arguments)], capture_output=True, text=True, env=_environment(), timeout=300
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def call(environment: Callable[[str], Path]) -> Iterator[Recover]:
    """Yield the same function, faster: in a process that has imported Lightning, which takes seconds, before."""
    modules = ("lightning.pytorch", "converter.convert", "networkx", "onnx.reference", "onnxruntime", "onnxscript")
    with forked(environment("lightning"), (*modules, "torch._export"), _environment()) as run:
        yield run


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "shifted.pt"
    torch.save(recovering.shifted().state_dict(), path)
    return path


def _flags(loader: str = "shuffled", steps: int = 60, evaluation: str | None = "held_out") -> tuple[str, ...]:
    judged = () if evaluation is None else ("--eval", f"recovering:{evaluation}")
    return ("--data", f"recovering:{loader}", *judged, "--steps", str(steps))


def _entry(target: Path) -> RecoveryEntry:
    measured = Artifact.open(target).measurements()
    assert measured is not None
    assert measured.recovery is not None
    return measured.recovery


@pytest.fixture(scope="session")
def recovered(call: Recover, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    target = tmp_path_factory.mktemp("recovered") / "m" / "1"
    done = call("recover", source, *SHIFTED, *CHEAP, *_flags(), "--precision", "32-true", "--out", target)
    return target, done.published()


def _relative(entry: RecoveryEntry, profile: str = "cpu") -> Any:
    return next(row for row in entry.drift if row.profile == profile and row.metric == "relative_l2")


def test_recovery_brings_an_artifact_within_its_budget(recovered: tuple[Path, Outcome]) -> None:
    """Drift is measured from the fp32 outputs of the original weights, on inputs that were not used for training."""
    target, _ = recovered
    row = _relative(_entry(target))
    assert row.bound is not None
    assert row.before is not None
    assert row.after < row.bound < row.before


def test_recovered_weights_give_outputs_close_to_the_source(recovered: tuple[Path, Outcome]) -> None:
    """The test compares with torch itself, independently of the code that measured the drift."""
    from bf16kit.runtime.loading import load

    target, _ = recovered
    runtime = load(Artifact.open(target), "cpu")
    model = recovering.shifted()
    distances = []
    for feeds in recovering.held_out():
        with torch.no_grad():
            expected = model(torch.from_numpy(feeds["x"]))["logits"].numpy()
        got = runtime.run(feeds)["logits"]
        distances.append(np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1))
    assert np.mean(distances) == pytest.approx(_relative(_entry(target)).after, rel=1e-3)
    assert np.mean(distances) < 1.5e-2


def test_restore_gives_the_trained_weights_as_exact_bf16_values(
    recovered: tuple[Path, Outcome], call: Recover, source: Path, tmp_path: Path
) -> None:
    target, _ = recovered
    call("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    found, original = load_file(tmp_path / "fp32.safetensors"), torch.load(source, weights_only=True)
    assert found.keys() == original.keys()
    assert all(array.dtype == np.float32 for array in found.values())
    for name in ("up.weight", "down.weight"):
        assert not np.array_equal(found[name], original[name].numpy())
        assert not (found[name].view(np.uint32) & 0xFFFF).any(), name  # the 16 low bits are zero
    assert (found["up.bias"].view(np.uint32) & 0xFFFF).any()  # vectors stay fp32


def test_the_manifest_names_the_original_and_the_recovery_options(
    recovered: tuple[Path, Outcome], source: Path
) -> None:
    import hashlib

    target, _ = recovered
    manifest = Artifact.open(target).manifest
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest.options["recovery"] == {
        "recovered_from": digest,
        "steps": 60,
        "precision": "32-true",
        "loss": "distillation",
        "loss_scaling": "none",
        "learning_rate": 1e-3,
    }
    assert manifest.source.sha256 != digest
    assert manifest.source.format == "torch, recovered"
    assert manifest.tools["lightning"]


def test_the_command_prints_its_measurements(recovered: tuple[Path, Outcome]) -> None:
    _, done = recovered
    for said in ("Drift from the fp32 outputs of the original weights on 4 batches of recovering:held_out",
                 "bf16 recovered", "Gradients computed in fp32",
                 "60 steps on the cpu, 32-true (products in float32)"):  # fmt: skip
        assert said in done.out, said
    assert "training, steps 1 to 6 of 60" in done.err


def test_nothing_but_the_artifact_is_left(recovered: tuple[Path, Outcome]) -> None:
    target, _ = recovered
    assert [path.name for path in target.parent.iterdir()] == ["1"]


def test_a_killed_and_resumed_recovery_gives_the_same_weights(
    command: list[str], alone: Recover, call: Recover, source: Path, tmp_path: Path
) -> None:
    """SIGKILL comes when the first checkpoint exists; the loader draws from numpy's global generator."""
    flags = (*SHIFTED, *CHEAP, *_flags("shuffled", 40), "--checkpoint-every", "7", "--allow-over-budget")
    whole, parts = tmp_path / "whole" / "1", tmp_path / "parts" / "1"
    alone("recover", source, *flags, "--out", whole).published()
    arguments = [*command, "recover", str(source), *flags, "--out", str(parts)]
    begun = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment())
    last = parts.parent / ".1.recovery" / "last.ckpt"
    until(last.exists, seconds=120)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert not parts.exists()
    call("recover", source, *flags, "--out", parts).refused(2, "holds an unfinished recovery", "--resume")
    call("recover", source, *flags, "--seed", "1", "--resume", "--out", parts).refused(2, "--seed is 1 now, and was 0")
    alone("recover", source, *flags, "--checkpoint-every", "5", "--resume", "--out", parts).published()
    one, other = Artifact.open(whole), Artifact.open(parts)
    assert one.manifest.files["weights.bf16"] == other.manifest.files["weights.bf16"]
    assert one.manifest.source == other.manifest.source
    assert _entry(whole).gradients == _entry(parts).gradients
    assert _entry(whole).training == _entry(parts).training
    assert [path.name for path in parts.parent.iterdir()] == ["1"]


def test_16_mixed_on_a_cpu_computes_in_fp16(call: Recover, source: Path, tmp_path: Path) -> None:
    """Lightning's own ``16-mixed`` would compute in bf16. The static scale of 1024 never overflows."""
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, *CHEAP, *_flags(steps=12), "--precision", "16-mixed", "--allow-over-budget")
    done = call("recover", source, *flags, "--loss-scaling", "static=1024", "--out", target).published()
    training = _entry(target).training
    assert (training.computed, training.skipped, training.scale_last) == ("float16", 0, 1024.0)
    assert "computed its products in fp16" in done.out


def test_a_scale_that_always_overflows_is_an_error(call: Recover, source: Path, tmp_path: Path) -> None:
    flags = (*SHIFTED, *CHEAP, *_flags(steps=3), "--precision", "16-mixed", "--loss-scaling", "static=1e37")
    call("recover", source, *flags, "--out", tmp_path / "m" / "1").refused(3, "all 3 steps were skipped")


def test_a_dynamic_scale_backs_off_and_grows(call: Recover, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, *CHEAP, *_flags(steps=40), "--precision", "16-mixed", "--loss-scaling", "dynamic=3")
    call("recover", source, *flags, "--allow-over-budget", "--out", target).published()
    training = _entry(target).training
    assert training.scale_first == 2.0**16
    assert 0 < training.skipped < 40  # the scale doubles every third step until fp16 overflows
    assert training.scale_last != training.scale_first


def test_weights_in_bf16_lose_updates_and_the_report_gives_their_share(
    call: Recover, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, *CHEAP, *_flags(steps=10), "--precision", "bf16-true", "--allow-over-budget")
    done = call("recover", source, *flags, "--out", target).published()
    training = _entry(target).training
    assert training.computed == "bfloat16"
    assert training.updates_lost is not None
    assert 0.1 < training.updates_lost < 1
    assert "weights without an fp32 copy" in done.out


def test_labels_give_accuracy_and_can_be_the_training_loss(call: Recover, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, *CHEAP, *_flags("labelled", 20, None), "--loss", "cross-entropy", "--precision", "32-true")
    flags = (*flags, "--learning-rate", "1e-4", "--allow-over-budget")
    done = call("recover", source, *flags, "--out", target).published()
    entry = _entry(target)
    found = {row.model: row for row in entry.accuracy}
    assert found["fp32"].correct == found["fp32"].rows == 256  # the labels are this model's outputs
    assert 0.9 < found["cpu, as it was"].share < 1
    assert found["cpu, recovered"].rows == 256
    assert entry.training.loss_last < entry.training.loss_first
    assert not entry.held_out
    assert "judged on its training data" in done.out


def test_missing_labels_are_an_error_for_cross_entropy(call: Recover, source: Path, tmp_path: Path) -> None:
    flags = (*SHIFTED, *CHEAP, *_flags(steps=2), "--loss", "cross-entropy")
    call("recover", source, *flags, "--out", tmp_path / "m" / "1").refused(2, "--data gives no labels")
    assert tree(tmp_path) == []


def test_a_loss_that_is_not_finite_stops_the_recovery_with_advice(call: Recover, source: Path, tmp_path: Path) -> None:
    """fp32 can compute these inputs, and fp16 cannot."""
    flags = (*SHIFTED, *CHEAP, *_flags("large", 5), "--precision", "16-mixed", "--loss-scaling", "none")
    done = call("recover", source, *flags, "--out", tmp_path / "m" / "1")
    done.refused(3, "recovery stopped at step 1 of 5: ", "train with --precision bf16-mixed", "--learning-rate (0.001)")
    assert tree(tmp_path) == []


def test_inputs_that_give_nan_in_fp32_are_named_by_batch(call: Recover, source: Path, tmp_path: Path) -> None:
    flags = (*SHIFTED, *CHEAP, *_flags("infinite", 5), "--samples", "recovering:held_out")
    done = call("recover", source, *flags, "--out", tmp_path / "m" / "1")
    done.refused(2, "--data recovering:infinite: batch 0: the fp32 model gives NaN", "leave out the batch")
    assert tree(tmp_path) == []


def test_training_that_only_worsens_the_model_keeps_the_initial_weights(call: Recover, tmp_path: Path) -> None:
    """The model is fine in bf16, and the learning rate is too high: the bf16 weights stay the same, bit for bit."""
    from architectures import Mlp, save

    source = save(tmp_path / "mlp.pt", Mlp())
    plain, target = tmp_path / "plain" / "1", tmp_path / "m" / "1"
    flags = ("--model", "architectures:Mlp", "--input", "x:float32:batch,16")
    call("checkpoint", source, *flags, "--format", "onnx", "--profile", "cpu", "--out", plain).published()
    wild = (*_flags("scattered", 4, "scattered"), "--learning-rate", "0.9", "--precision", "32-true")
    done = call("recover", source, *flags, *CHEAP, *wild, "--out", target).published()
    training = _entry(target).training
    assert training.kept == 0
    assert training.rate_share == 0.5**4  # four evaluations, none of them better
    assert Artifact.open(target).manifest.files["weights.bf16"] == Artifact.open(plain).manifest.files["weights.bf16"]
    assert "kept: the weights before the first step" in done.out
    row = _relative(_entry(target))
    assert row.before is not None
    assert row.after <= row.before


def test_weights_that_help_only_on_training_data_are_not_published(call: Recover, source: Path, tmp_path: Path) -> None:
    """The evaluation inputs have another level, at which the corrected biases are off by the correction."""
    target, plain = tmp_path / "m" / "1", tmp_path / "plain" / "1"
    call("checkpoint", source, *SHIFTED, *CHEAP[:4], "--allow-over-budget", "--no-search", "--out", plain).published()
    flags = (*SHIFTED, *CHEAP, *_flags("unlabelled", 4, "scattered"), "--precision", "32-true", "--allow-over-budget")
    done = call("recover", source, *flags, "--out", target).published()
    assert "because the trained weights did worse on recovering:scattered" in done.out
    row = _relative(_entry(target))
    assert row.after == row.before
    assert Artifact.open(target).manifest.files["weights.bf16"] == Artifact.open(plain).manifest.files["weights.bf16"]


def test_resume_without_a_checkpoint_starts_at_step_1_and_reports_it(
    call: Recover, source: Path, tmp_path: Path
) -> None:
    """Jobs that may be killed at any time always start with the same command line."""
    flags = (*SHIFTED, *CHEAP, *_flags(steps=1), "--precision", "32-true", "--resume", "--out", tmp_path / "m" / "1")
    done = call("recover", source, *flags).published()
    assert "held no checkpoint, so this recovery began at step 1" in done.out


def test_a_loader_that_fails_in_training_is_reported_by_file_and_line(
    call: Recover, source: Path, tmp_path: Path
) -> None:
    """The exception passes through Lightning, and no traceback is printed."""
    flags = (*SHIFTED, *CHEAP, *_flags("failing_later", 20), "--out", tmp_path / "m" / "1")
    done = call("recover", source, *flags)
    done.refused(2, "--data recovering:failing_later: failed, batch 9: RuntimeError", f"({recovering.__file__}, line ")


def test_a_full_disk_during_training_is_reported(alone: Recover, source: Path, tmp_path: Path) -> None:
    """The file size limit fits the artifact, but not a checkpoint with the optimiser's moments."""
    flags = (
        *SHIFTED,
        *CHEAP,
        *_flags(steps=40),
        "--checkpoint-every",
        "1",
        "--no-report",
        "--out",
        tmp_path / "m" / "1",
    )
    done = alone("recover", source, *flags, within=("prlimit", "--fsize=20000"))
    done.refused(2, "last.ckpt: disk full", "no checkpoint was kept; free some space")
    assert tree(tmp_path) == []


def test_a_failed_recovery_is_published_only_with_allow_over_budget(
    call: Recover, source: Path, tmp_path: Path
) -> None:
    """The training is complete, so the second command publishes from the checkpoint without another step."""
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, *CHEAP, *_flags(steps=2), "--budget", "relative_l2=1e-7")
    call("recover", source, *flags, "--out", target).refused(1, "not recovered, nothing published", "relative_l2 is")
    assert not target.exists()
    done = call("recover", source, *flags, "--resume", "--allow-over-budget", "--out", target).published()
    assert "not recovered, published because of --allow-over-budget" in done.out
    assert "training, steps" not in done.err


def test_a_model_within_budget_before_recovery_is_reported(call: Recover, tmp_path: Path) -> None:
    from architectures import Mlp, save

    source = save(tmp_path / "mlp.pt", Mlp())
    flags = ("--model", "architectures:Mlp", "--input", "x:float32:batch,16", *CHEAP, *_flags(steps=2))
    done = call("recover", source, *flags, "--learning-rate", "1e-6", "--out", tmp_path / "m" / "1").published()
    assert "bf16 was within budget before recovery, so none was needed" in done.out


def test_the_html_report_has_the_recovery_tables(recovered: tuple[Path, Outcome]) -> None:
    target, _ = recovered
    page = (target / "report.html").read_text("utf-8")
    for said in ("<h2>Recovery</h2>", "bf16 before", "Gradients computed in fp32", "recovering:held_out"):
        assert said in page, said


def test_inspect_json_has_the_recovery(recovered: tuple[Path, Outcome], call: Recover) -> None:
    target, _ = recovered
    found = json.loads(call("inspect", target, "--json").published().out)
    assert found["recovery"]["training"]["steps"] == 60
