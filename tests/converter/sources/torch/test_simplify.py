"""The rewrite rules that clean up an exporter's graph: the conversion fails and names a rule that is missing."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import graphs
from bf16kit.errors import ConversionError
from converter.sources.torch import simplify


def test_every_rule_exists_in_the_installed_onnxscript() -> None:
    from onnxscript.rewriter.rules import common

    assert [name for name in simplify._RULES if not hasattr(common, name)] == []


def test_a_rule_that_was_renamed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "_RULES", (*simplify._RULES, "no_such_rule"))
    with pytest.raises(ConversionError, match=r"onnxscript \S+ has no rewrite rule 'no_such_rule'"):
        simplify.simplify(ir.from_proto(graphs.mlp()))
