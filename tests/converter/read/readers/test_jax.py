"""JAX's leaves in a torch module or an ONNX graph: placed by rules or by a confirmed proposal, and restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import orbaxfiles
import pytest
import torch
import yaml
from architectures import Cnn, Mlp, seeded
from converting import ONNX_ONLY, Cli, tree
from flaxfiles import packed
from restored import assert_restored
from safetensors import safe_open

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load_reference

MLP = ("--model", "architectures:Mlp", "--input", "x:float32:batch,16", *ONNX_ONLY)
X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
Tree = dict[str, np.ndarray]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    found: Tree = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: np.asarray(value)}
    return found


def mlp_params(up: str = "up", down: str = "down", hidden: int = 64) -> Mapping[str, Any]:
    """Return the parameters of ``architectures.Mlp`` as Flax stores them: kernels are [in, out]."""
    state = {name: tensor.numpy() for name, tensor in seeded(Mlp(hidden=hidden)).state_dict().items()}
    return {
        "params": {
            up: {"kernel": np.ascontiguousarray(state["up.weight"].T), "bias": state["up.bias"]},
            down: {"kernel": np.ascontiguousarray(state["down.weight"].T), "bias": state["down.bias"]},
        }
    }


def _write(path: Path, given: Mapping[str, Any]) -> Path:
    path.write_bytes(packed(given))
    return path


@pytest.fixture
def mlp_msgpack(tmp_path: Path) -> Path:
    return _write(tmp_path / "mlp.msgpack", {**mlp_params(), "step": 7})


def test_without_a_map_a_proposal_is_printed_that_works_as_a_map(
    cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path
) -> None:
    """The printed text is a file for --map. With it, outputs are the model's and leaves are restored."""
    refused = cli("checkpoint", mlp_msgpack, *MLP, "--out", target)
    refused.refused(2, "a map of its 5 leaves to the model is proposed", "--accept-map", "--map", "--samples")
    assert not target.exists()
    rules = yaml.safe_load(refused.out)
    assert {rule.get("to") for rule in rules["rules"]} == {"up.weight", "up.bias", "down.weight", "down.bias", None}
    (tmp_path / "rules.yaml").write_text(refused.out)
    cli("checkpoint", mlp_msgpack, *MLP, "--map", tmp_path / "rules.yaml", "--out", target).published()
    artifact = Artifact.open(target)
    assert artifact.manifest.source.format == "flax-msgpack"
    expected = seeded(Mlp())(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(load_reference(artifact).run({"x": X})["output"], expected, atol=1e-5)
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _flat({**mlp_params(), "step": np.int64(7)}))


def test_samples_with_the_outputs_confirm_a_proposal(cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path) -> None:
    expected = seeded(Mlp())(torch.from_numpy(X)).detach().numpy()
    np.savez(tmp_path / "s.npz", x=X, output=expected)
    done = cli("checkpoint", mlp_msgpack, *MLP, "--samples", tmp_path / "s.npz", "--out", target).published()
    assert "the proposed map is confirmed" in " ".join(done.out.split())
    cli("verify", target, "--samples", tmp_path / "s.npz").published()  # verify ignores the outputs


def test_samples_with_other_outputs_reject_a_proposal(
    cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path
) -> None:
    expected = seeded(Mlp())(torch.from_numpy(X)).detach().numpy()
    np.savez(tmp_path / "s.npz", x=X, output=expected * np.float32(1.001))
    refused = cli("checkpoint", mlp_msgpack, *MLP, "--samples", tmp_path / "s.npz", "--out", target)
    refused.refused(2, "is not confirmed: output 'output' is 0.000999 (relative_l2)", "fp32 noise explains at most")
    assert "match: 'params\\.up\\.kernel'" in refused.out
    assert tree(target.parent.parent) == []


def test_samples_without_outputs_do_not_confirm_a_proposal(
    cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path
) -> None:
    np.savez(tmp_path / "s.npz", x=X)
    refused = cli("checkpoint", mlp_msgpack, *MLP, "--samples", tmp_path / "s.npz", "--out", target)
    refused.refused(2, "the file s.npz holds inputs but no outputs")


def test_a_given_map_is_checked_against_the_outputs_too(
    cli: Cli, tmp_path: Path, target: Path, mlp_msgpack: Path
) -> None:
    """The rules fit the model, but the outputs in the samples are zeros, which it does not give."""
    refused = cli("checkpoint", mlp_msgpack, *MLP, "--out", target)
    (tmp_path / "rules.yaml").write_text(refused.out)
    np.savez(tmp_path / "s.npz", x=X, output=np.zeros((3, 10), np.float32))
    given = ("--map", tmp_path / "rules.yaml", "--samples", tmp_path / "s.npz")
    refused = cli("checkpoint", mlp_msgpack, *MLP, *given, "--out", target)
    refused.refused(3, "the model does not give the outputs in the file s.npz")


def test_two_layers_of_one_shape_without_a_name_are_ambiguous(cli: Cli, tmp_path: Path, target: Path) -> None:
    square = ("--model", "architectures:Mlp", "--model-args", '{"hidden": 16, "classes": 16}', *MLP[2:])
    state = {name: t.numpy() for name, t in seeded(Mlp(hidden=16, classes=16)).state_dict().items()}
    layers = {
        f"Dense_{index}": {"kernel": np.ascontiguousarray(state[f"{name}.weight"].T), "bias": state[f"{name}.bias"]}
        for index, name in enumerate(("up", "down"))
    }
    source = _write(tmp_path / "square.msgpack", {"params": layers})
    refused = cli("checkpoint", source, *square, "--accept-map", "--out", target)
    refused.refused(
        2, "--accept-map cannot accept this map", "shapes are equal and names do not decide: params.Dense_0"
    )
    assert "# GUESSED" in refused.out
    expected = seeded(Mlp(hidden=16, classes=16))(torch.from_numpy(X)).detach().numpy()
    np.savez(tmp_path / "s.npz", x=X, output=expected)
    cli("checkpoint", source, *square, "--samples", tmp_path / "s.npz", "--out", target).published()


def test_an_accepted_map_is_reported_as_unconfirmed(cli: Cli, target: Path, mlp_msgpack: Path) -> None:
    done = cli("checkpoint", mlp_msgpack, *MLP, "--accept-map", "--out", target).published()
    assert "--accept-map: 5 leaves were placed by the proposed map, which was not confirmed" in " ".join(
        done.out.split()
    )


@pytest.mark.long
def test_a_convolutional_model_with_batch_statistics_is_converted_and_restored(
    cli: Cli, tmp_path: Path, target: Path
) -> None:
    """HWIO kernels are stored once, as OIHW, and restored as HWIO. torch's counters of batches are the model's own."""
    state = {name: tensor.numpy() for name, tensor in seeded(Cnn()).state_dict().items()}
    convs = {f"Conv_{i}": state[f"features.{3 * i}.weight"].transpose(2, 3, 1, 0) for i in range(2)}
    params: dict[str, Any] = {name: {"kernel": np.ascontiguousarray(kernel)} for name, kernel in convs.items()}
    params["Conv_1"] = {"kernel": np.ascontiguousarray(convs["Conv_1"]), "bias": state["features.3.bias"]}
    params["Dense_0"] = {"kernel": np.ascontiguousarray(state["head.weight"].T), "bias": state["head.bias"]}
    stats: dict[str, Any] = {}
    for i in range(2):
        norm = f"features.{3 * i + 1}"
        params[f"BatchNorm_{i}"] = {"scale": state[f"{norm}.weight"], "bias": state[f"{norm}.bias"]}
        stats[f"BatchNorm_{i}"] = {"mean": state[f"{norm}.running_mean"], "var": state[f"{norm}.running_var"]}
    given: dict[str, Any] = {"params": params, "batch_stats": stats, "opt_state": {"mu": np.zeros(7, np.float32)}}
    source = _write(tmp_path / "cnn.msgpack", given)
    x = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)
    expected = seeded(Cnn())(torch.from_numpy(x)).detach().numpy()
    np.savez(tmp_path / "s.npz", x=x, output=expected)
    arguments = ("--model", "architectures:Cnn", "--input", "x:float32:batch,3,16,16", "--samples", tmp_path / "s.npz")
    done = cli("checkpoint", source, *arguments, *ONNX_ONLY, "--out", target).published()
    assert "left out: 1 array of the training state under opt_state" in " ".join(done.out.split())
    entries = {entry.name: entry for entry in Artifact.open(target).manifest.checkpoint}
    assert entries["params.Conv_0.kernel"].permutation == [2, 3, 1, 0]
    assert Artifact.open(target).manifest.files["residual.bin"].bytes < sum(a.nbytes for a in _flat(params).values())
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    del given["opt_state"]
    assert_restored(tmp_path / "fp32.safetensors", _flat(given))
    exported = target.with_name("2")  # an export has the leaves under JAX's names, in JAX's layout
    cli("checkpoint", source, *arguments, "--format", "safetensors", "--no-report", "--out", exported).published()
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        kernel = file.get_tensor("params.Conv_1.kernel")
    assert torch.equal(kernel, torch.from_numpy(params["Conv_1"]["kernel"]).bfloat16())
    cli("restore", exported, "--out", tmp_path / "again.safetensors").published()
    assert_restored(tmp_path / "again.safetensors", _flat(given))


def test_bf16_leaves_pass_through_exactly(cli: Cli, tmp_path: Path, target: Path) -> None:
    given = mlp_params()
    half = {
        "params": {
            name: {k: v.astype(ml_dtypes.bfloat16) for k, v in layer.items()} for name, layer in given["params"].items()
        }
    }
    source = _write(tmp_path / "half.msgpack", half)
    cli("checkpoint", source, *MLP, "--accept-map", "--out", target).published()
    stored = Artifact.open(target)
    own = half["params"]["up"]["kernel"]
    name = next(e.tensor for e in stored.manifest.checkpoint if e.name == "params.up.kernel")
    assert sorted(stored.tensor(name).view(np.uint16).reshape(-1)) == sorted(own.view(np.uint16).reshape(-1))
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _flat(half))


def _given(target: Path) -> list[tuple[str, str, str]]:
    """Return the files besides the checkpoint from which the artifact was made, as its manifest lists them."""
    return [(file.option, file.name, file.sha256) for file in Artifact.open(target).manifest.given]


def test_an_onnx_graph_can_be_the_architecture(cli: Cli, tmp_path: Path, target: Path) -> None:
    """Its MatMuls take [in, out], as JAX does. All of its own weights are replaced."""
    model = graphs.mlp()
    weights = graphs.weights_of(model)
    onnx.save(model, tmp_path / "graph.onnx")
    rng = np.random.default_rng(5)
    own = {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in weights.items()}
    given = {"params": {f"layer_{i}": {"kernel": own[f"w{i}"], "bias": own[f"b{i}"]} for i in range(2)}}
    source = _write(tmp_path / "m.msgpack", given)
    x = rng.standard_normal((3, weights["w0"].shape[0])).astype(np.float32)
    expected = np.maximum(x @ own["w0"] + own["b0"], 0) @ own["w1"] + own["b1"]
    np.savez(tmp_path / "s.npz", x=x, y=expected)
    arguments = ("--model", tmp_path / "graph.onnx", "--samples", tmp_path / "s.npz", *ONNX_ONLY)
    cli("checkpoint", source, *arguments, "--out", target).published()
    assert _given(target) == [("--model", "graph.onnx", sha256((tmp_path / "graph.onnx").read_bytes()).hexdigest())]
    found = load_reference(Artifact.open(target)).run({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", _flat(given))


def test_rules_rename_a_torch_state_dict_too(cli: Cli, tmp_path: Path, target: Path) -> None:
    state = seeded(Mlp()).state_dict()
    torch.save({f"net.{name.replace('up', 'first')}": tensor for name, tensor in state.items()}, tmp_path / "m.pt")
    (tmp_path / "rules.yaml").write_text(
        "rules:\n- {match: 'net\\.first\\.(.*)', to: 'up.\\1'}\n- {match: 'net\\.(.*)', to: '\\1'}\n"
    )
    arguments = (*MLP, "--map", tmp_path / "rules.yaml")
    cli("checkpoint", tmp_path / "m.pt", *arguments, "--out", target).published()
    rules = (tmp_path / "rules.yaml").read_bytes()
    digest, size = sha256(rules).hexdigest(), len(rules)
    assert _given(target) == [("--map", "rules.yaml", digest)]
    assert Artifact.open(target).manifest.schema_version == 7
    assert f"--map       rules.yaml, {size} bytes, sha256 {digest}" in cli("inspect", target).published().out
    told = json.loads(cli("inspect", target, "--json").published().out)["given"]
    assert told == [{"option": "--map", "name": "rules.yaml", "sha256": digest, "bytes": size}]
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    wanted = {f"net.{name.replace('up', 'first')}": tensor.numpy() for name, tensor in state.items()}
    assert_restored(tmp_path / "fp32.safetensors", wanted)


@pytest.mark.long  # two conversions, and a process to read each
def test_a_directory_of_orbax_steps_is_converted(cli: Cli, tmp_path: Path, target: Path) -> None:
    """The newest step is taken, or the one that --step names, and the item of --item; the optimizer is left out."""
    pytest.importorskip("tensorstore", reason="the extra `orbax` is not installed")
    root = tmp_path / "run"
    leaves = _flat(mlp_params())
    for step, scale in ((3, 2.0), (20, 1.0)):
        for item in ("weights", "ema"):
            own = {name: array * np.float32(scale if item == "weights" else 5) for name, array in leaves.items()}
            own["opt_state.mu"] = np.zeros(3, np.float32)
            orbaxfiles.write(root / str(step) / item, own, ocdbt=item == "weights")
    cli("checkpoint", root, *MLP, "--accept-map", "--out", target).refused(2, "several items, ema, weights")
    taken = ("--item", "weights", "--accept-map")
    done = cli("checkpoint", root, *MLP, *taken, "--out", target).published()
    said = " ".join(done.out.split())
    assert "left out: 1 array of the training state under opt_state" in said
    assert "the weights are those of '20/weights' in run; --step and --item choose others" in said
    cli("restore", target, "--out", tmp_path / "fp32.safetensors").published()
    assert_restored(tmp_path / "fp32.safetensors", leaves)
    older = target.with_name("2")
    cli("checkpoint", root, *MLP, *taken, "--step", "3", "--out", older).published()
    cli("restore", older, "--out", tmp_path / "older.safetensors").published()
    assert_restored(tmp_path / "older.safetensors", {name: array * np.float32(2) for name, array in leaves.items()})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "holds weights but no architecture; name it with --model pkg.mod:factory"),
        (("--model", "architectures:Mlp", "--accept-map"), "--input NAME:DTYPE:DIMS, for example"),
        (("--model", "architectures:Mlp", "--step", "3"), "--step: is for Orbax checkpoints"),
        (("--model", "architectures:Mlp", "--item", "x"), "--item: is for Orbax checkpoints"),
        (("--model", "architectures:Mlp", "--accept-map", "--map", "r.yaml"), "leave out one of them"),
        (("--model", "architectures:Mlp", "--map", "absent.yaml"), "--map absent.yaml: cannot be read: No such file"),
        (
            ("--model", "architectures:Cnn", "--accept-map"),
            "nothing in the checkpoint was found for the model's: features.0.weight",
        ),
    ],
)
def test_missing_or_wrong_options_are_rejected(
    cli: Cli, target: Path, mlp_msgpack: Path, arguments: tuple[str, ...], said: str
) -> None:
    cli("checkpoint", mlp_msgpack, *arguments, "--out", target).refused(2, said)


def test_a_map_is_rejected_if_the_source_has_its_own_graph(cli: Cli, target: Path, onnx_file: Path) -> None:
    cli("checkpoint", onnx_file, "--accept-map", "--out", target).refused(2, "is for weights without a graph")
