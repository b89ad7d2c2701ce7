"""Options are checked before long work starts, and an error names the flag."""

from __future__ import annotations

from pathlib import Path

from bf16kit.numerics.tensors import TensorSpec
from converter.options import Options, parse_inputs, parse_model_args, parse_outputs, parse_patterns, parse_target


def test_the_last_two_parts_of_out_are_model_and_version() -> None:
    target = parse_target(Path("repository/mini-lm.v2/12"))
    assert (target.model, target.version) == ("mini-lm.v2", 12)
    assert target.path.is_absolute()


def test_dimensions_are_sizes_or_names() -> None:
    assert parse_inputs(["ids:int64:batch, seq", "image:0:float32:n,3,8,8", "steps:int64:"]) == (
        TensorSpec("ids", "int64", ("batch", "seq")),
        TensorSpec("image:0", "float32", ("n", 3, 8, 8)),
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
