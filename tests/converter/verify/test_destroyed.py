"""No model with a destroyed slice is published, however small the slice is beside the rest; sound models are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from destroyed import KINDS, write

from bf16kit.messages.errors import BudgetExceeded
from converter.convert import convert
from converter.options import Options, parse_target

CASES = int(os.environ.get("BF16KIT_JUDGE_CASES", "96"))  # half of them destroyed; 2,000 before a release


def _options(source: Path, target: Path) -> Options:
    return Options(
        source=source, target=parse_target(target), formats=("onnx",), profiles=("cpu",), search=False, report=False
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_destroyed_slice_is_rejected_and_the_slice_is_named(kind: str, tmp_path: Path) -> None:
    for seed in range(KINDS.index(kind), CASES // 2, len(KINDS)):
        case = write(tmp_path / f"{seed}.onnx", seed, destroyed=True)
        with pytest.raises(BudgetExceeded) as refused:
            convert(_options(case.path, tmp_path / "repository" / f"m{seed}" / "1"))
        assert f"slice_error of index {case.index} of axis {case.axis} is" in str(refused.value), case


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_with_no_destroyed_slice_is_published(kind: str, tmp_path: Path) -> None:
    for seed in range(KINDS.index(kind), CASES // 2, len(KINDS)):
        case = write(tmp_path / f"{seed}.onnx", seed, destroyed=False)
        manifest = convert(_options(case.path, tmp_path / "repository" / f"m{seed}" / "1")).artifact.manifest
        assert manifest.drift["cpu"].outputs["y"]["slice_error"]["worst"] < 0.1, case
