"""Input that cannot be converted is rejected with one clear message, and no files are left behind."""

from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import Mlp, save
from converting import MLP, ONNX_ONLY, Cli, tree

ARGUMENTS = (*MLP, *ONNX_ONLY)


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "said"),
    [(float("nan"), "1024 of 1024 values are NaN"), (float("inf"), "infinite"), (3.4e38, "overflow bfloat16")],
)
def test_weights_that_bf16_cannot_hold_are_named_and_counted(
    cli: Cli, tmp_path: Path, target: Path, values: float, said: str
) -> None:
    source = save(tmp_path / "m.pt", Mlp(), up__weight=torch.full((64, 16), values))
    cli("checkpoint", source, "--out", target, *ARGUMENTS).refused(3, "'up.weight'", said)
    assert tree(tmp_path) == ["m.pt"]


def test_a_target_that_exists_is_rejected_before_anything_is_read(cli: Cli, tmp_path: Path, target: Path) -> None:
    target.mkdir(parents=True)
    cli("checkpoint", tmp_path / "absent", "--out", target).refused(2, "already exists", "--force")


def test_samples_that_are_missing_are_rejected_before_anything_is_read(cli: Cli, tmp_path: Path, target: Path) -> None:
    absent = tmp_path / "absent.npz"
    said = f"--samples {absent}: no such file or directory"
    cli("checkpoint", tmp_path / "no-source", "--samples", absent, "--out", target).refused(2, said)


def test_a_failed_conversion_keeps_the_previous_artifact(
    cli: Cli, tmp_path: Path, onnx_file: Path, target: Path
) -> None:
    command = ("--out", target, "--force", *ONNX_ONLY)
    cli("checkpoint", onnx_file, *command).published()
    before = (target / "manifest.json").read_bytes()
    cli("checkpoint", onnx_file, *command, "--no-search", "--budget", "relative_l2=1e-9").refused(
        1, "nothing published"
    )
    assert (target / "manifest.json").read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *(
            (["--out", f"repository/m/{version}"], f"--out repository/m/{version}: must end in MODEL/VERSION")
            for version in ("m", "0", "01", "one", "-1", "9" * 19)
        ),
        *((["--out", f"repository/{name}/1"], "is not a model name") for name in (".hidden", "two words", "ü")),
        (["--out", "s3://bucket/m/1"], "'s3://bucket/m/1' is a URL: give a file or directory of this machine"),
        (["--input", "y:float32:batch,16"], "the model's inputs are x"),
        (["--input", "x:float16:batch,16"], "the model's own input is float32"),
        (["--input", "x"], "--input 'x': expected NAME:DTYPE:DIMS"),
        (["--input", "x:float31:2"], "unknown dtype 'float31'"),
        (["--input", "x:string:2"], "unknown dtype 'string'"),
        (["--input", "x:float32:0"], "'0' is neither a size of 1 or more nor a name"),
        (["--input", "x:float32:2,,3"], "'' is neither"),
        (["--input", "x:float32:2", "--input", "x:int64:2"], "--input x: given twice"),
        (["--output", "y"], "expected NAME:KIND, the kind one of logits, embedding, regression, other"),
        (["--output", ":logits"], "expected NAME:KIND"),
        (["--output", "y:logits", "--output", "y:other"], "--output y: given twice"),
        (["--output", "scores:0:logits"], "--output scores:0: the model's outputs are y"),
        (["--budget", "accuracy=1"], "unknown metric 'accuracy'"),
        (["--budget", "relative_l2=small"], "'small' is not a number"),
        (["--keep-fp32", "("], "--keep-fp32 '(': not a regular expression"),
        (["--bf16", "no_such_tensor"], "matches no node or tensor"),
        (["--samples", "absent.npz"], "no such file or directory"),
        (["--model", "architectures:Mlp"], "an ONNX file brings its own architecture"),
        (["--model-args", "{"], "--model-args: not JSON"),
        *((["--model-args", text], "--model-args: expected a JSON object") for text in ("[1]", "8")),
    ],
)
def test_a_bad_option_is_named(cli: Cli, onnx_file: Path, target: Path, flags: list[str], said: str) -> None:
    out = [] if "--out" in flags else ["--out", str(target)]
    cli("checkpoint", onnx_file, *out, *flags).refused(2, said)
    assert not target.parent.exists()


def test_samples_that_are_pickles_are_not_run(cli: Cli, tmp_path: Path, onnx_file: Path, target: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "sprung",)

    np.savez(tmp_path / "trap.npz", x=np.array([Trap()], dtype=object))
    cli("checkpoint", onnx_file, "--out", target, "--samples", tmp_path / "trap.npz").refused(2, "cannot be read")
    assert not (tmp_path / "sprung").exists()
