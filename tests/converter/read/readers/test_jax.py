"""JAX's leaves in a torch module or an ONNX graph: read bit for bit, placed by rules, and restored."""

import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from architectures import Mlp, seeded
from converting import ONNX_ONLY, Cli, tree
from flaxfiles import MLP_RULES, chunked, extension, mlp_params, packed
from restored import assert_restored
from safetensors import safe_open

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.read.detect import Kind, recognise
from bf16kit.converter.read.jax import read_flax
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.loading import load_reference

pytest.importorskip("msgpack", reason="the extra `jax` is not installed")

MLP = ("--model", "architectures:Mlp", "--input", "x:float32:batch,16", *ONNX_ONLY)
X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
Tree = dict[str, np.ndarray]
W = np.arange(12, dtype=np.float32).reshape(3, 4)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    found: Tree = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: np.asarray(value)}
    return found


def _write(path: Path, given: Mapping[str, Any]) -> Path:
    path.write_bytes(packed(given))
    return path


@pytest.fixture
def mlp_msgpack(tmp_path: Path) -> Path:
    return _write(tmp_path / "mlp.msgpack", {"params": mlp_params(), "step": 7})


@pytest.mark.long
def test_rules_fill_the_model_and_samples_confirm_it(cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path) -> None:
    """Outputs are the model's and leaves are restored; outputs that come with the samples are compared."""
    expected = seeded(Mlp())(torch.from_numpy(X)).detach().numpy()
    np.savez(tmp_path / "s.npz", x=X, output=expected)
    given = (*MLP, "--map", MLP_RULES, "--samples", tmp_path / "s.npz")
    done = cli("checkpoint", mlp_msgpack, *given, "--out", target).published()
    assert "the expected outputs are confirmed" in " ".join(done.out.split())
    artifact = Artifact.open(target)
    assert artifact.manifest.source.format == "flax-msgpack"
    np.testing.assert_allclose(load_reference(artifact).run({"x": X})["output"], expected, atol=1e-5)
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _flat({"params": mlp_params(), "step": np.int64(7)}))
    cli("verify", target, "--samples", tmp_path / "s.npz").published()  # verify ignores the outputs


def test_without_rules_a_template_of_them_is_printed(cli: Cli, target: Path, mlp_msgpack: Path) -> None:
    refused = cli("checkpoint", mlp_msgpack, *MLP, "--out", target)
    refused.refused(2, "5 of its 5 leaves match no tensor of the model", "complete the rules", "--map")
    assert "# params.up.kernel [16, 64]      up.weight [64, 16]" in refused.out.splitlines()
    assert r"- {match: 'params\.up\.kernel', to: '', steps: []}" in refused.out.splitlines()
    assert not target.exists()


@pytest.mark.long
def test_samples_with_other_outputs_reject_a_map(cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path) -> None:
    expected = seeded(Mlp())(torch.from_numpy(X)).detach().numpy()
    np.savez(tmp_path / "s.npz", x=X, output=expected * np.float32(1.001))
    refused = cli("checkpoint", mlp_msgpack, *MLP, "--map", MLP_RULES, "--samples", tmp_path / "s.npz", "--out", target)
    said = "the model does not give the outputs in the file s.npz: output 'output' is 0.000999 (relative_l2)"
    refused.refused(3, said, "fp32 noise explains at most")
    assert tree(target.parent.parent) == []


@pytest.mark.long
def test_a_kernel_of_a_convolution_is_stored_once_and_exported_in_jaxs_layout(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    conv = seeded(torch.nn.Conv2d(3, 64, 3)).state_dict()
    params = {"kernel": conv["weight"].permute(2, 3, 1, 0).contiguous().numpy(), "bias": conv["bias"].numpy()}
    source = _write(tmp_path / "conv.msgpack", {"params": params})
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- {match: 'params\\.kernel', to: weight, steps: [{transpose: [3, 2, 0, 1]}]}\n"
        "- {match: 'params\\.bias', to: bias}\n"
    )
    built = '{"in_channels": 3, "out_channels": 64, "kernel_size": 3}'
    model = ("--model", "torch.nn:Conv2d", "--model-args", built, "--input", "x:float32:batch,3,16,16")
    arguments = (*model, "--map", tmp_path / "rules.yaml", "--no-report")
    cli("checkpoint", source, *arguments, "--format", "onnx", "--out", target).published()
    entries = {entry.name: entry for entry in Artifact.open(target).manifest.checkpoint}
    assert entries["params.kernel"].permutation == [2, 3, 1, 0]
    assert Artifact.open(target).manifest.files["residual.bin"].bytes < params["kernel"].nbytes
    exported = target.with_name("2")
    cli("checkpoint", source, *arguments, "--format", "safetensors", "--out", exported).published()
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        kernel = file.get_tensor("params.kernel")
    assert torch.equal(kernel, torch.from_numpy(params["kernel"]).bfloat16())
    for artifact in (target, exported):
        cli("restore", artifact, "--out", tmp_path / "fp32.safetensors", "--force").published()
        assert_restored(tmp_path / "fp32.safetensors", _flat({"params": params}))


def _given(target: Path) -> list[tuple[str, str, str]]:
    """Return the files besides the checkpoint from which the artifact was made, as its manifest lists them."""
    return [(file.option, file.name, file.sha256) for file in Artifact.open(target).manifest.given]


@pytest.mark.long
def test_rules_rename_a_torch_state_dict_too(cli: Cli, tmp_path: Path, target: Path) -> None:
    state = seeded(Mlp()).state_dict()
    torch.save({f"net.{name.replace('up', 'first')}": tensor for name, tensor in state.items()}, tmp_path / "m.pt")
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- {match: 'net\\.first\\.(.*)', to: 'up.\\1'}\n- {match: 'net\\.(.*)', to: '\\1'}\n"
    )
    arguments = (*MLP, "--map", tmp_path / "rules.yaml")
    cli("checkpoint", tmp_path / "m.pt", *arguments, "--out", target).published()
    rules = (tmp_path / "rules.yaml").read_bytes()
    digest = sha256(rules).hexdigest()
    assert _given(target) == [("--map", "rules.yaml", digest)]
    assert Artifact.open(target).manifest.schema_version == 8
    assert f"--map       rules.yaml, {len(rules)} bytes, sha256 {digest}" in cli("inspect", target).published().out
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    wanted = {f"net.{name.replace('up', 'first')}": tensor.numpy() for name, tensor in state.items()}
    assert_restored(tmp_path / "fp32.safetensors", wanted)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "holds weights but no architecture; name it with --model pkg.mod:factory"),
        (("--model", "architectures:Mlp", "--map", "{rules}"), "--input NAME:DTYPE:DIMS, for example"),
        (("--model", "architectures:Mlp", "--step", "3"), "--step: is for Orbax checkpoints"),
        (("--model", "architectures:Mlp", "--map", "absent.yaml"), "--map absent.yaml: cannot be read: No such file"),
    ],
)
def test_missing_or_wrong_options_are_rejected(
    cli: Cli, target: Path, mlp_msgpack: Path, arguments: tuple[str, ...], said: str
) -> None:
    given = [argument.format(rules=MLP_RULES) for argument in arguments]
    cli("checkpoint", mlp_msgpack, *given, "--out", target).refused(2, said)


# --- Flax's files -----------------------------------------------------------------------------------------------------


def test_flax_leaves_are_named_by_their_keys_in_the_files_order(tmp_path: Path) -> None:
    """Text and None are left out, list elements are numbered, and split arrays are joined."""
    half = W.astype(ml_dtypes.bfloat16)
    params = {"b": {"kernel": W, "bias": W[0]}, "a": half, "table": chunked(W, 5)}
    rest = {"name": "mlp", "none": None, "layers": [W, {"w": W}], "rate": 0.5, "on": True, "step": 7}
    found = read_flax(_write(tmp_path / "m.msgpack", {"params": params, **rest}))
    names = ["params.b.kernel", "params.b.bias", "params.a", "params.table"]
    assert list(found) == [*names, "layers.0", "layers.1.w", "rate", "on", "step"]
    assert found["params.a"].tobytes() == half.tobytes()
    np.testing.assert_array_equal(found["params.table"], W)
    assert found["step"].dtype == np.int64
    assert found["step"].tolist() == 7


def test_every_dtype_that_bf16kit_supports_is_read(tmp_path: Path) -> None:
    for dtype in (name for name in BY_NAME if name != "string"):
        for own in (np.arange(6).astype(BY_NAME[dtype].numpy).reshape(2, 3), np.zeros((0, 4), BY_NAME[dtype].numpy)):
            found = read_flax(_write(tmp_path / "m.msgpack", {"pad": "x" * 3, "w": own}))["w"]
            assert (found.dtype, found.shape, found.tobytes()) == (own.dtype, own.shape, own.tobytes())


def test_a_flax_file_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    for count in (1, 15, 16, 300):
        assert recognise(_write(tmp_path / "m.bin", {f"layer{index}": 1 for index in range(count)})) is Kind.FLAX


def _array(shape: Any, dtype: Any, data: Any) -> bytes:
    return packed({"w": 0})[:-1] + extension(1, packed([shape, dtype, data]))


_PARTS = {"__msgpack_chunked_array__": True, "chunks": {"0": W.reshape(-1)}}
_WRONG: dict[str, tuple[bytes, str]] = {
    "cut": (packed({"w": W})[:-5], "incomplete input"),
    "too many keys": (b"\xdf\xff\xff\xff\xff\xa1w", "4294967295 exceeds max_map_len"),
    "a shape beyond memory": (_array([2**40, 2**40], "float32", b""), "cannot reshape"),
    "objects": (_array([1], "object", bytes(8)), "unknown dtype 'object'; known: bool, int8"),
    "no array inside": (b"\x81\xa1w" + extension(1, b"\x07"), "truncated or damaged"),
    "two of one name": (packed({"a.b": W, "a": {"b": W}}), "two arrays are called 'a.b'"),
    "deep": (b"\x81\xa1w" * 5000 + b"\x01", "truncated or damaged"),
    "parts without a shape": (packed({"w": _PARTS}), "'shape'"),
}


@pytest.mark.parametrize("kind", _WRONG)
def test_a_damaged_flax_file_is_rejected_with_the_reason(tmp_path: Path, kind: str) -> None:
    content, said = _WRONG[kind]
    (tmp_path / "m.msgpack").write_bytes(content)
    with pytest.raises(SourceError) as refused:
        read_flax(tmp_path / "m.msgpack")
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{tmp_path / 'm.msgpack'}: truncated or damaged")


def test_without_msgpack_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlp_msgpack: Path
) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(UsageError, match=r"pip install 'bf16kit\[jax\]'"):
        read_flax(mlp_msgpack)
