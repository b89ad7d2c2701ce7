"""``bf16-convert recover``, on a model to which bf16 is costly: what it gives back, resumes, rejects and reports."""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recovering
import torch
from architectures import Cnn, Mlp, Tied, save
from converting import MLP, SUPPORT, Cli, Outcome, run_command, tree
from openfiles import files_of_at_most
from safetensors.numpy import load_file
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import RecoveredDrift, RecoveryEntry
from bf16kit.converter.recovery.trainable import Loader
from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec

SHIFTED = ("--model", "recovering:Shifted", "--input", "x:float32:batch,16")
CHEAP = ("--format", "onnx", "--profile", "cpu", "--device", "cpu")


def _flags(
    loader: str = "shuffled", steps: int = 60, evaluation: str | None = "held_out", *, report: bool = False
) -> tuple[str, ...]:
    judged = () if evaluation is None else ("--eval", f"recovering:{evaluation}")
    more = () if report else ("--no-report",)
    return (*CHEAP, "--data", f"recovering:{loader}", *judged, "--steps", str(steps), *more)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "shifted.pt"
    torch.save(recovering.shifted().state_dict(), path)
    return path


@pytest.fixture(scope="session")
def recovered(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    target = tmp_path_factory.mktemp("recovered") / "m" / "1"
    done = run_command("recover", source, *SHIFTED, *_flags(report=True), "--precision", "32-true", "--out", target)
    return target, done.published()


def _entry(target: Path) -> RecoveryEntry:
    measured = Artifact.open(target).measurements()
    assert measured is not None
    assert measured.recovery is not None
    return measured.recovery


def _drift(target: Path) -> RecoveredDrift:
    return next(row for row in _entry(target).drift if row.profile == "cpu" and row.metric == "relative_l2")


@pytest.mark.long
def test_recovery_brings_an_artifact_within_its_budget(recovered: tuple[Path, Outcome]) -> None:
    """Drift is from the original weights' fp32 outputs, on inputs that were not used for training; torch agrees."""
    from bf16kit.runtime.loading import load

    target, _ = recovered
    row = _drift(target)
    assert row.bound is not None
    assert row.before is not None
    assert row.after < row.bound < row.before
    runtime, model, distances = load(Artifact.open(target), "cpu"), recovering.shifted(), []
    for feeds in recovering.held_out():
        with torch.no_grad():
            expected = model(torch.from_numpy(feeds["x"]))["logits"].numpy()
        distances.append(
            np.linalg.norm(runtime.run(feeds)["logits"] - expected, axis=1) / np.linalg.norm(expected, axis=1)
        )
    assert np.mean(distances) == pytest.approx(row.after, rel=1e-3)


def test_restore_gives_the_trained_weights_as_exact_bf16_values(
    recovered: tuple[Path, Outcome], source: Path, cli: Cli, tmp_path: Path
) -> None:
    cli("restore", recovered[0], "--out", tmp_path / "fp32.safetensors").published()
    found, original = load_file(tmp_path / "fp32.safetensors"), torch.load(source, weights_only=True)
    assert found.keys() == original.keys()
    for name in ("up.weight", "down.weight"):
        assert not (found[name].view(np.uint32) & 0xFFFF).any(), name  # the 16 low bits are zero
    assert (found["up.bias"].view(np.uint32) & 0xFFFF).any()  # vectors stay fp32
    assert not np.array_equal(found["up.bias"], original["up.bias"].numpy())


def test_what_was_done_is_printed_and_recorded(recovered: tuple[Path, Outcome], source: Path, cli: Cli) -> None:
    target, done = recovered
    title = "Drift from the fp32 outputs of the original weights on 4 batches of recovering:held_out"
    for said in (title, "bf16 recovered", "60 steps on the cpu, 32-true (products in float32)"):
        assert said in done.out, said
    assert "training, steps 1 to 6 of 60" in done.err
    assert [path.name for path in target.parent.iterdir()] == ["1"]
    manifest = Artifact.open(target).manifest
    expected = {"steps": 60, "precision": "32-true", "loss": "distillation", "loss_scaling": "none"}
    expected |= {"recovered_from": hashlib.sha256(source.read_bytes()).hexdigest(), "learning_rate": 1e-3}
    assert manifest.options["recovery"] == expected
    assert manifest.source.format == "torch, recovered"
    assert json.loads(cli("inspect", target, "--json").published().out)["recovery"]["training"]["steps"] == 60
    page = (target / "report.html").read_text("utf-8")
    for said in ("<h2>Recovery</h2>", "bf16 before", "recovering:held_out"):
        assert said in page, said


@pytest.mark.long
def test_a_killed_and_resumed_recovery_gives_the_same_weights(source: Path, cli: Cli, tmp_path: Path) -> None:
    """SIGKILL comes when the first checkpoint exists; the loader draws from numpy's global generator."""
    flags = (*SHIFTED, *_flags(steps=40), "--checkpoint-every", "7", "--allow-over-budget")
    whole, parts = tmp_path / "whole" / "1", tmp_path / "parts" / "1"
    cli("recover", source, *flags, "--out", whole).published()
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SUPPORT)])
    arguments = [sys.executable, "-m", "bf16kit.converter.cli", "recover", str(source), *flags, "--out", str(parts)]
    begun = subprocess.Popen(
        arguments, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}
    )
    until((parts.parent / ".1.recovery" / "last.ckpt").exists, seconds=120)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert not parts.exists()
    cli("recover", source, *flags, "--out", parts).refused(2, "holds an unfinished recovery", "--resume")
    other_seed = ("--seed", "1", "--resume", "--out", parts)
    cli("recover", source, *flags, *other_seed).refused(2, "--resume: seed is 1 now, and was 0")
    other = tmp_path / "other.pt"
    torch.save({name: value + 1 for name, value in recovering.shifted().state_dict().items()}, other)
    cli("recover", other, *flags, "--resume", "--out", parts).refused(2, "--resume: the sha256 of the weights")
    cli("recover", source, *flags, "--resume", "--samples", "recovering:held_out", "--out", parts).published()
    one, two = Artifact.open(whole).manifest, Artifact.open(parts).manifest
    for name in ("weights.bf16", "weights.fp32"):
        assert one.files[name] == two.files[name]
    assert one.source == two.source
    assert _entry(whole).training == _entry(parts).training
    assert [path.name for path in parts.parent.iterdir()] == ["1"]


@pytest.mark.long
def test_a_failed_recovery_is_published_only_with_allow_over_budget(source: Path, cli: Cli, tmp_path: Path) -> None:
    """The training is complete, so the second command publishes from the checkpoint without another step.

    Jobs that may be killed at any time always start with the same command line, so --resume needs no checkpoint.
    """
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, *_flags(steps=2), "--budget", "relative_l2=1e-7", "--resume", "--out", target)
    cli("recover", source, *flags).refused(1, "nothing published", "relative_l2 is")
    assert not target.exists()
    done = cli("recover", source, *flags, "--allow-over-budget").published()
    assert "not recovered, published because of --allow-over-budget" in done.out
    assert "training, steps" not in done.err
    shutil.rmtree(target)
    done = cli("recover", source, *flags, "--allow-over-budget").published()
    assert "held no checkpoint, so this recovery began at step 1" in done.out


@pytest.mark.long
def test_a_static_scale_stays_and_fp16_computes_on_a_cpu(source: Path, cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "m" / "1"
    flags = (*SHIFTED, "--precision", "16-mixed", "--allow-over-budget")
    scale = ("--loss-scaling", "static=1024")
    cli("recover", source, *flags, *_flags(steps=12), *scale, "--out", target).published()
    training = _entry(target).training
    assert (training.computed, training.skipped, training.scale_last) == ("float16", 0, 1024.0)
    other = ("--out", tmp_path / "n" / "1")
    large = cli("recover", source, *flags, *_flags("large", 5), "--loss-scaling", "none", *other)
    large.refused(3, "recovery stopped at step 1 of 5: ", "bf16-mixed", "--learning-rate (0.001)")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    huge = cli("recover", source, *flags, *_flags(steps=3), "--loss-scaling", f"static={10**37}", *other)
    huge.refused(3, "all 3 steps were skipped")


@pytest.mark.long
def test_a_dynamic_scale_backs_off_and_grows_and_bf16_alone_needs_none(source: Path, cli: Cli, tmp_path: Path) -> None:
    flags = (*SHIFTED, *_flags(steps=40), "--precision", "16-mixed", "--loss-scaling", "dynamic=3")
    cli("recover", source, *flags, "--allow-over-budget", "--out", tmp_path / "m" / "1").published()
    training = _entry(tmp_path / "m" / "1").training
    assert training.scale_first == 2.0**16
    assert 0 < training.skipped < 40  # the scale doubles every third step until fp16 overflows
    assert training.scale_last != training.scale_first
    flags = (*SHIFTED, *_flags(steps=10), "--precision", "bf16-true", "--allow-over-budget")
    cli("recover", source, *flags, "--out", tmp_path / "m" / "2").published()
    assert _entry(tmp_path / "m" / "2").training.computed == "bfloat16"


@pytest.mark.long
def test_training_that_only_worsens_the_model_keeps_the_initial_weights(cli: Cli, tmp_path: Path) -> None:
    source, plain, target = save(tmp_path / "mlp.pt", Mlp()), tmp_path / "plain" / "1", tmp_path / "m" / "1"
    cli("checkpoint", source, *MLP, "--format", "onnx", "--profile", "cpu", "--no-report", "--out", plain).published()
    wild = (*_flags("scattered", 4, "scattered"), "--learning-rate", "0.9", "--precision", "32-true")
    done = cli("recover", source, *MLP, *wild, "--out", target).published()
    assert _entry(target).training.kept == 0
    assert _entry(target).training.rate_share == 0.5**4  # four evaluations, none of them better
    assert Artifact.open(target).manifest.files["weights.bf16"] == Artifact.open(plain).manifest.files["weights.bf16"]
    assert "bf16 was within budget before recovery, so none was needed" in done.out
    row = _drift(target)
    assert row.before is not None
    assert row.after <= row.before


@pytest.mark.long
def test_weights_that_help_only_on_training_data_are_not_published(source: Path, cli: Cli, tmp_path: Path) -> None:
    """The evaluation inputs have another level, at which the fitted biases are wrong."""
    target, plain = tmp_path / "m" / "1", tmp_path / "plain" / "1"
    cli(
        "checkpoint", source, *SHIFTED, *CHEAP[:4], "--allow-over-budget", "--no-search", "--no-report", "--out", plain
    ).published()
    flags = (*SHIFTED, *_flags("unlabelled", 4, "scattered"), "--precision", "32-true", "--allow-over-budget")
    done = cli("recover", source, *flags, "--out", target).published()
    assert "because the trained weights did worse on recovering:scattered" in done.out
    assert _drift(target).after == _drift(target).before
    assert Artifact.open(target).manifest.files["weights.bf16"] == Artifact.open(plain).manifest.files["weights.bf16"]


@pytest.mark.long
def test_folded_batchnorm_and_tied_weights_are_trained_as_the_artifact_rounds_them(cli: Cli, tmp_path: Path) -> None:
    """The recovered artifact's own drift is fp32 noise: its fp32 weights are what bf16 holds, factors folded in."""
    for name, module, given, loader in (
        ("Cnn", Cnn(), "x:float32:batch,3,16,16", "images"),
        ("Tied", Tied(), "ids:int64:batch,seq", "ids"),
    ):
        source, target = save(tmp_path / f"{name}.pt", module), tmp_path / name / "1"
        flags = ("--model", f"architectures:{name}", "--input", given, "--precision", "32-true")
        done = cli("recover", source, *flags, *_flags(loader, 20, None), "--out", target).published()
        row = _drift(target)
        assert row.before is not None
        assert row.own < 1e-6 < row.after < row.before
        assert "judged on its training data" in done.out


@pytest.mark.long
def test_a_full_disk_during_training_is_reported(source: Path, cli: Cli, tmp_path: Path) -> None:
    """The file size limit fits the artifact, but not a checkpoint with the optimiser's moments."""
    flags = (*SHIFTED, *_flags(steps=40), "--checkpoint-every", "1")
    with files_of_at_most(20000):
        done = cli("recover", source, *flags, "--out", tmp_path / "m" / "1")
    done.refused(2, "last.ckpt: cannot be written (", "free some space")
    assert tree(tmp_path) == []


def test_a_checkpoint_that_cannot_be_read_is_named(source: Path, cli: Cli, tmp_path: Path) -> None:
    """Another version may have written it."""
    last = tmp_path / "m" / ".1.recovery" / "last.ckpt"
    last.parent.mkdir(parents=True)
    torch.save({"global_step": 7}, last)
    done = cli("recover", source, *SHIFTED, *_flags(steps=4), "--resume", "--out", tmp_path / "m" / "1")
    done.refused(2, f"{last}: cannot be read", "to start again")


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--loss-scaling", "static=1024"), "bf16 has the exponents of fp32"),
        (("--precision", "16-mixed", "--loss-scaling", "static"), "expected none, static=K"),
        (("--device", "tpu"), "--device tpu: "),
        (("--data", "recovering:absent"), "module recovering has no 'absent'"),
        (("--eval", "recovering:nothing"), "--eval recovering:nothing: yielded nothing"),
        (("--data", "recovering:infinite", "--eval", "recovering:held_out"), "batch 0: the fp32 model gives NaN"),
        (("--eval", "recovering:exits"), "failed, batch 1: it called sys.exit('no more data')"),
    ],
)
def test_wrong_usage_is_rejected(
    cli: Cli, mlp_file: Path, target: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    cli("recover", mlp_file, *MLP, *_flags("unlabelled", 4, None), *flags, "--out", target).refused(2, said)
    assert tree(tmp_path) == []


def test_a_source_or_a_target_that_cannot_be_recovered_is_rejected(
    cli: Cli, onnx_file: Path, target: Path, tmp_path: Path
) -> None:
    flags = _flags("unlabelled", 4, None)
    cli("recover", onnx_file, *flags, "--out", target).refused(2, "which torch cannot train", "--model pkg.mod:factory")
    assert tree(tmp_path) == []
    target.mkdir(parents=True)
    cli("recover", "absent.pt", *MLP, *flags, "--out", target).refused(2, "already exists", "--force")


_A, _B = np.ones((3, 2), np.float32), np.arange(3)


@pytest.mark.parametrize(
    "given",
    [
        {"a": _A, "b": _B},
        {"a": _A, "b": _B, "labels": _B},
        ({"a": _A, "b": _B}, _B),
        (_A, _B),
        [torch.from_numpy(_A), torch.from_numpy(_B), torch.from_numpy(_B)],
    ],
)
def test_a_batch_may_have_any_usual_form(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setattr(recovering, "three", lambda: [given])
    inputs = (TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "int64", ("batch",)))
    (batch,) = Loader("--data", "recovering:three", inputs, 0).batches(0)
    assert np.array_equal(batch["a"], _A)
    assert np.array_equal(batch["b"], _B)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ("nothing", "recovering:nothing: yielded nothing in pass 1; each time it is called it must return a new"),
        ("once", "yielded nothing in pass 2; each time it is called it must return a new"),
        ("wide", "batch 0: input 'x' has shape [4, 17]"),
        ("empty", "batch 0: input 'x' has no elements"),
        ("three", "batch 0: has 3 parts"),
        ("no_numbers", "recovering:no_numbers: batch 1: input 'x' holds NaN"),
        ("failing", f"batch 1: RuntimeError: the disk went away ({recovering.__file__}, line"),
        ("failing_worker", "failed, batch 0: RuntimeError: the disk went away"),
    ],
)
def test_batches_that_do_not_fit_the_model_are_rejected(loader: str, said: str) -> None:
    batches = Loader("--data", f"recovering:{loader}", (TensorSpec("x", "float32", ("batch", 16)),), 0).batches
    with pytest.raises(UsageError, match=re.escape(said)):
        list(itertools.chain(batches(0), batches(1)))
