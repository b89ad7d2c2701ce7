"""Options are checked before long work starts, and an error names the flag."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.options import Options, parse_inputs, parse_model_args, parse_outputs, parse_patterns, parse_target


def test_the_last_two_parts_of_out_are_model_and_version() -> None:
    target = parse_target(Path("repository/mini-lm.v2/12"))
    assert (target.model, target.version) == ("mini-lm.v2", 12)
    assert target.path.is_absolute()


def test_dimensions_are_sizes_or_names() -> None:
    assert parse_inputs(["ids:int64:batch, seq", "image:float32:n,3,8,8", "steps:int64:"]) == (
        TensorSpec("ids", "int64", ("batch", "seq")),
        TensorSpec("image", "float32", ("n", 3, 8, 8)),
        TensorSpec("steps", "int64", ()),
    )


def test_recorded_options_contain_no_path() -> None:
    options = Options(source=Path("/secret/place"), target=parse_target(Path("/r/m/1")), samples="/secret/samples")
    assert "secret" not in str(options.recorded())


def test_outputs_patterns_and_arguments_are_parsed() -> None:
    assert parse_outputs(["scores:0:logits", "y:regression"]) == {"scores:0": "logits", "y": "regression"}
    assert parse_patterns("--bf16", ["a.*", "b"]) == ("a.*", "b")
    assert parse_model_args(None) == {}
    assert parse_model_args('{"hidden": 8}') == {"hidden": 8}


def _keep_fp32(texts: list[str]) -> object:
    return parse_patterns("--keep-fp32", texts)


@pytest.mark.parametrize(
    ("parse", "given", "said"),
    [
        *(
            (parse_target, Path(f"r/m/{v}"), f"--out r/m/{v}: must end in MODEL/VERSION")
            for v in ("0", "01", "one", "-1")
        ),
        *((parse_target, Path(f"r/{name}/1"), "is not a model name") for name in (".hidden", "two words", "ü")),
        (parse_inputs, ["x"], "--input 'x': expected NAME:DTYPE:DIMS"),
        (parse_inputs, [":float32:2"], "expected NAME:DTYPE:DIMS"),
        (parse_inputs, ["x:float31:2"], "unknown dtype 'float31'"),
        (parse_inputs, ["x:string:2"], "unknown dtype 'string'"),
        (parse_inputs, ["x:float32:0"], "'0' is neither a size of 1 or more nor a name"),
        (parse_inputs, ["x:float32:-1"], "'-1' is neither"),
        (parse_inputs, ["x:float32:2,,3"], "'' is neither"),
        (parse_inputs, ["x:float32:batch size"], "--input 'x:float32:batch size': 'batch size' is neither"),
        (parse_inputs, ["x:float32:2", "x:int64:2"], "--input x: given twice"),
        (parse_outputs, ["y"], "expected NAME:KIND, the kind one of logits, embedding, regression, other"),
        (parse_outputs, ["y:classes"], "expected NAME:KIND"),
        (parse_outputs, [":logits"], "expected NAME:KIND"),
        (parse_outputs, ["y:logits", "y:other"], "--output y: given twice"),
        (_keep_fp32, ["("], "--keep-fp32 '(': not a regular expression"),
        *((parse_model_args, text, "--model-args") for text in ("{", "[1]", "8")),
    ],
)
def test_a_malformed_option_is_named_with_the_form_expected(
    parse: Callable[[Any], object], given: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse(given)
