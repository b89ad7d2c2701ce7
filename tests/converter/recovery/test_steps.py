"""A recovery resumes only with the options and weights with which it began."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bf16kit.messages.errors import UsageError
from converter.options import Options, parse_inputs, parse_target
from converter.recovery.directory import open_directory
from converter.recovery.settings import Scaling, Settings
from converter.recovery.steps import _options_to_check
from converter.source import Checkpoint

SETTINGS = Settings(
    data="m:loader",
    evaluation=None,
    steps=4,
    precision="bf16-mixed",
    scaling=Scaling("none"),
    loss="distillation",
    learning_rate=1e-3,
    device="cpu",
    checkpoint_every=1,
    resume=True,
)


def _checkpoint(value: float) -> Checkpoint:
    """Return a checkpoint with weights of ``value``; the file's digest is always the same."""
    return Checkpoint("a Lightning checkpoint", "0" * 64, {"w": np.full(3, value, np.float32)})


def _resume(options: Options, then: Options, checkpoint: Checkpoint) -> None:
    """Begin a recovery with ``options``; resume it with the options ``then`` and the weights of ``checkpoint``."""
    with contextlib.suppress(RuntimeError), open_directory(options.target, resume=False) as place:
        place.check_options(_options_to_check(options, SETTINGS, _checkpoint(0), "cpu"))
        place.write_checkpoint(lambda file: file.write(b"weights"))
        raise RuntimeError
    with open_directory(options.target, resume=True) as place:
        place.check_options(_options_to_check(then, SETTINGS, checkpoint, "cpu"))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    (tmp_path / "rules.yaml").write_text("rules: []")
    (tmp_path / "other.yaml").write_text("rules: [ ]")
    target = parse_target(tmp_path / "repository" / "m" / "1")
    return Options(source=tmp_path / "m.ckpt", target=target, map=tmp_path / "rules.yaml")


@pytest.mark.parametrize(
    ("flag", "change"),
    [
        ("--weights", {"weights": "ema"}),
        ("--input", {"inputs": parse_inputs(["x:float32:batch,16"])}),
        ("--output", {"outputs": {"y": "logits"}}),
        ("--step", {"step": 3}),
        ("--item", {"item": "params"}),
        ("--with-past", {"with_past": True}),
        ("--format", {"formats": ("pt2",)}),
        ("--profile", {"profiles": ("cpu",)}),
        ("--seed", {"seed": 1}),
    ],
)
def test_a_changed_option_is_rejected_by_name(options: Options, flag: str, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^--resume: {flag} is .* now, and was "):
        _resume(options, replace(options, **change), _checkpoint(0))


def test_changed_rules_are_rejected_but_the_same_rules_in_another_file_are_not(
    options: Options, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"^--resume: --map is 'sha256 .* now, and was 'sha256 "):
        _resume(options, replace(options, map=tmp_path / "other.yaml"), _checkpoint(0))
    (tmp_path / "other.yaml").write_text("rules: []")
    with open_directory(options.target, resume=True) as place:
        place.check_options(
            _options_to_check(replace(options, map=tmp_path / "other.yaml"), SETTINGS, _checkpoint(0), "cpu")
        )


def test_other_weights_of_the_same_file_are_rejected(options: Options) -> None:
    with pytest.raises(UsageError, match=r"^--resume: the sha256 of the weights that it begins with is "):
        _resume(options, options, _checkpoint(1))


def test_options_that_only_judge_or_publish_may_change(options: Options) -> None:
    _resume(options, replace(options, allow_over_budget=True, report=False, samples="x.npz"), _checkpoint(0))
