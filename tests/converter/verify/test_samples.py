"""Calibration samples: files, directories and functions, and the errors that they can have."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli, tree
from safetensors.numpy import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.verify.samples import LIMIT, load, samples_usage
from bf16kit.messages.errors import SamplesError
from bf16kit.numerics.tensors import TensorSpec

_X = (TensorSpec("x", "float32", ("batch", 16)),)


def _rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(count).standard_normal((count, 16)).astype(np.float32)}


def test_a_file_is_one_feed_a_directory_many_and_a_function_yields_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", allow_pickle=False, **_rows(3))
    save_file(_rows(1), tmp_path / "a.safetensors")
    (tmp_path / "README.md").write_text("not a sample")
    for given, rows, origin in (
        (tmp_path / "b.npz", [3], "the file b.npz"),
        (tmp_path / "a.safetensors", [1], "the file a.safetensors"),
        (tmp_path, [1, 3], f"the directory {tmp_path.name}"),  # in the order of names
        ("feeders:three", [1, 2, 3], "feeders:three"),
        ("feeders:arrays", [1], "feeders:arrays"),  # an array alone will do for a model with one input
    ):
        found = load(str(given), _X)
        assert [len(feed["x"]) for feed in found.feeds] == rows
        assert found.origin == origin
    assert load(str(tmp_path), _X).feeds[1]["x"].tolist() == _rows(3)["x"].tolist()
    assert len(load("feeders:endless", _X).feeds) == LIMIT


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("absent.npz", "--samples absent.npz: no such file or directory, and not a function such as pkg.mod:name"),
        ("feeders:absent", "module feeders has no 'absent'"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("feeders:nothing", "the function yielded nothing"),
        ("feeders:failing", "the function failed: OSError: the disk of the user's own data set"),
        ("feeders:doubles", "sample 0: input 'x' has dtype float64, expected float32"),
        ("feeders:ragged", "sample 0: input 'x' is not an array: ValueError: setting an array element"),
    ],
)
def test_unusable_samples_are_rejected_with_the_reason(given: str, said: str) -> None:
    with pytest.raises(SamplesError if "import" not in said and "absent" not in given else Exception) as refused:
        load(given, _X)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"z": np.zeros((1, 16), np.float32)}, "unknown input 'z'; the model's inputs are x"),
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((1, 17), np.float32)}, "[1, 17]"),
        ({"x": np.zeros(16, np.float32)}, "rank 1"),
        ({"x": np.zeros((1, 16), np.int64)}, "has dtype int64, expected float32"),
        ({"x": np.zeros((0, 16), np.float32)}, "a sample without elements cannot be measured"),
    ],
)
def test_a_feed_that_does_not_fit_is_rejected_with_its_file(
    tmp_path: Path, arrays: dict[str, np.ndarray], said: str
) -> None:
    np.savez(tmp_path / "a.npz", allow_pickle=False, **arrays)
    with pytest.raises(SamplesError) as refused:
        load(str(tmp_path / "a.npz"), _X)
    assert str(refused.value).startswith(f"--samples {tmp_path / 'a.npz'}: ")
    assert said in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    contents = {
        "a.npz": (b"", b"some text", b"PK\x03\x04" + bytes(50)),
        "a.safetensors": (b"", b"\xff" * 40),
        "a.txt": (b"1 2 3",),
    }
    for name, each in ((name, each) for name, found in contents.items() for each in found):
        (tmp_path / name).write_bytes(each)
        with pytest.raises(SamplesError, match=name):
            load(str(tmp_path / name), _X)


@pytest.mark.long
def test_a_conversion_measures_on_the_given_samples_and_records_them(cli: Cli, onnx_file: Path, target: Path) -> None:
    done = cli("checkpoint", onnx_file, "--out", target, "--samples", "feeders:three", *ONNX_ONLY).published()
    entry = Artifact.open(target).manifest.drift["cpu"]
    assert (entry.samples, entry.source) == (
        6,
        "feeders:three, and 13 made of them by perturbation, because they are too few to judge by",
    )
    assert "because --samples was not given" not in done.out


def test_samples_for_which_the_reference_gives_nan_are_rejected(
    cli: Cli, tmp_path: Path, onnx_file: Path, target: Path, small: Artifact
) -> None:
    x = np.zeros((3, 16), np.float32)
    x[1, 5] = np.nan
    np.savez(tmp_path / "a.npz", x=x)
    said = "the fp32 reference gives NaN for sample 0 of the file a.npz (output 'y', 16 of 48 values)"
    cli("checkpoint", onnx_file, "--out", target, "--samples", tmp_path / "a.npz").refused(2, said)
    cli("verify", small.path, "--samples", tmp_path / "a.npz").refused(2, said)
    assert tree(tmp_path) == ["a.npz"]


@pytest.mark.long
def test_a_model_that_fails_on_random_inputs_is_converted_with_given_samples(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    proto = graphs.parsed(
        "(int64[n] ids) => (float[n, 16] y) { shifted = Add (ids, ten) y = Gather (table, shifted) }",
        table=graphs.values(64, 16),
        ten=np.array(1000),
    )
    onnx.save(proto, tmp_path / "m.onnx")
    said = ("does not run on random inputs (seed 0)", "out of data bounds", "pass others with --samples")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target).refused(3, *said)
    np.savez(tmp_path / "a.npz", ids=np.arange(-1000, -990))
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, "--samples", tmp_path / "a.npz", *ONNX_ONLY).published()


def test_the_advice_on_giving_samples_can_be_pasted() -> None:
    specs = (TensorSpec("in:0", "float32", ("n", 2)), TensorSpec("rate", "int64", ()))
    said = samples_usage(specs)
    assert "numpy.savez('sample.npz', **{'in:0': …}, rate=…)" in said
    assert "the model takes in:0 float32[n,2], rate int64[]" in said


def test_an_empty_samples_option_is_rejected(cli: Cli, onnx_file: Path, target: Path, small: Artifact) -> None:
    """A shell variable that is not set gives an empty option, and an empty path would be the working directory."""
    cli("checkpoint", onnx_file, "--out", target, "--samples", "").refused(2, "--samples")
    cli("verify", small.path, "--samples", "").refused(2, "--samples")
