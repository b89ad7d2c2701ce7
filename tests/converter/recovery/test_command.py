"""``bf16-convert recover`` before it trains: what it rejects, with which message, and that no file is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from converting import MLP, Cli, tree

DATA = ("--data", "recovering:unlabelled", "--steps", "4", "--device", "cpu")


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Lightning with another module if it is not installed: nothing before training uses it."""
    try:
        import lightning  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "lightning", sys)


def test_without_lightning_the_command_says_what_to_install(
    cli: Cli, mlp_file: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    cli("recover", mlp_file, *MLP, *DATA, "--out", target).refused(2, "pip install 'bf16kit[lightning]'")
    assert tree(tmp_path) == []


@pytest.mark.usefixtures("lightning")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--steps", "0"), "--steps 0: a recovery takes 1 step or more"),
        (("--steps", "many"), "'many' is not a valid integer"),
        (("--precision", "fp8"), "'fp8' is not one of 'bf16-mixed', 'bf16-true', '16-mixed'"),
        (("--loss-scaling", "static=1024"), "bf16 has the exponents of fp32"),
        (("--precision", "16-mixed", "--loss-scaling", "static"), "expected none, static=K"),
        (("--learning-rate", "5"), "the default is 0.001"),
        (("--loss", "hinge"), "'hinge' is not one of"),
        (("--device", "tpu"), "--device tpu: expected auto, cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), "--device cuda:99: this machine has"),
        (("--checkpoint-every", "0"), "0 is not in the range"),
        (("--search",), "No such option"),
        (("--data", "recovering:absent"), "module recovering has no absent"),
        (("--data", "recovering:nothing"), "recovering:nothing: yielded nothing"),
        (("--data", "recovering:wide"), "input 'x' has shape [4, 17]"),
        (("--eval", "recovering:nothing"), "--eval recovering:nothing: yielded nothing"),
        (("--eval", "recovering:no_numbers"), "--eval recovering:no_numbers: batch 1: input 'x' holds NaN in 2 of 64"),
        (("--eval", "recovering:failing"), "failed, batch 1: RuntimeError: the disk went away (/"),
        (("--eval", "recovering:strange_labels", "--output", "output:logits"), "label 10 is not one of the 10 classes"),
    ],
)
def test_wrong_usage_is_rejected_before_anything_is_trained(
    cli: Cli, mlp_file: Path, target: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    cli("recover", mlp_file, *MLP, *DATA, *flags, "--out", target).refused(2, said)
    assert tree(tmp_path) == []


@pytest.mark.usefixtures("lightning")
def test_an_existing_target_is_rejected_before_anything_is_read(cli: Cli, target: Path) -> None:
    target.mkdir(parents=True)
    cli("recover", "absent.pt", *MLP, *DATA, "--out", target).refused(2, "already exists", "--force")


@pytest.mark.usefixtures("lightning")
def test_a_source_that_torch_cannot_train_is_rejected(cli: Cli, onnx_file: Path, target: Path, tmp_path: Path) -> None:
    cli("recover", onnx_file, *DATA, "--out", target).refused(2, "which torch cannot train", "--model pkg.mod:factory")
    assert tree(tmp_path) == []


def test_the_data_and_the_steps_are_required(cli: Cli, mlp_file: Path, target: Path) -> None:
    cli("recover", mlp_file, *MLP, "--steps", "4", "--out", target).refused(2, "Missing option '--data'")
    cli("recover", mlp_file, *MLP, "--data", "recovering:unlabelled", "--out", target).refused(2, "Missing option")
