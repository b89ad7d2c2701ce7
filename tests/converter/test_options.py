"""Options are checked before long work starts, and an error names the flag."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.options import Options, parse_inputs, parse_model_args, parse_outputs, parse_patterns, parse_target


def test_the_last_two_parts_of_out_are_model_and_version() -> None:
    target = parse_target(Path("repository/mini-lm.v2/12"))
    assert (target.model, target.version) == ("mini-lm.v2", 12)
    assert target.path.is_absolute()


@pytest.mark.parametrize("text", ["repository/m/0", "repository/m/01", "repository/m/one", "repository/m", "r/m/-1"])
def test_a_version_is_an_integer_of_one_or_more(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--out {text}: must end in MODEL/VERSION")):
        parse_target(Path(text))


@pytest.mark.parametrize("name", [".hidden", "two words", "ü"])
def test_a_model_name_must_fit_into_a_url_and_a_label(name: str) -> None:
    with pytest.raises(UsageError, match="is not a model name"):
        parse_target(Path("repository") / name / "1")


def test_dimensions_are_sizes_or_names() -> None:
    assert parse_inputs(["ids:int64:batch, seq", "image:float32:n,3,8,8", "steps:int64:"]) == (
        TensorSpec("ids", "int64", ("batch", "seq")),
        TensorSpec("image", "float32", ("n", 3, 8, 8)),
        TensorSpec("steps", "int64", ()),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "expected NAME:DTYPE:DIMS"),
        (":float32:2", "expected NAME:DTYPE:DIMS"),
        ("x:float31:2", "unknown dtype 'float31'"),
        ("x:string:2", "unknown dtype 'string'"),
        ("x:float32:0", "'0' is neither a size of 1 or more nor a name"),
        ("x:float32:-1", "'-1' is neither"),
        ("x:float32:2,,3", "'' is neither"),
        ("x:float32:batch size", "'batch size' is neither"),
    ],
)
def test_a_malformed_input_is_named_with_the_form_expected(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--input {text!r}: ") + ".*" + re.escape(said)):
        parse_inputs([text])


def test_an_input_given_twice_is_rejected() -> None:
    with pytest.raises(UsageError, match="--input x: given twice"):
        parse_inputs(["x:float32:2", "x:int64:2"])


def test_a_bad_pattern_is_named_with_its_flag() -> None:
    assert parse_patterns("--bf16", ["a.*", "b"]) == ("a.*", "b")
    with pytest.raises(UsageError, match=re.escape("--keep-fp32 '(': not a regular expression")):
        parse_patterns("--keep-fp32", ["("])


def test_model_args_are_a_json_object() -> None:
    assert parse_model_args(None) == {}
    assert parse_model_args('{"hidden": 8}') == {"hidden": 8}
    for text in ("{", "[1]", "8"):
        with pytest.raises(UsageError, match="--model-args"):
            parse_model_args(text)


def test_recorded_options_contain_no_path() -> None:
    options = Options(source=Path("/secret/place"), target=parse_target(Path("/r/m/1")), samples="/secret/samples")
    assert "secret" not in str(options.recorded())


def test_outputs_get_their_kinds_by_name() -> None:
    assert parse_outputs(["scores:0:logits", "y:regression"]) == {"scores:0": "logits", "y": "regression"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["y"], "expected NAME:KIND, the kind one of logits, embedding, regression, other"),
        (["y:classes"], "expected NAME:KIND"),
        ([":logits"], "expected NAME:KIND"),
        (["y:logits", "y:other"], "--output y: given twice"),
    ],
)
def test_a_wrong_output_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_outputs(texts)
