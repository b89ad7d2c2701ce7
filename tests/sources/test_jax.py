"""Checkpoints from Orbax and Flax in every layout: read bit for bit, converted, compared with Flax's outputs."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from converting import Outcome
from safetensors.numpy import load_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run
from bf16kit.converter.read.jax import locate, read_flax, read_item
from bf16kit.runtime.loading import load, load_reference

pytestmark = pytest.mark.sources

pytest.importorskip("tensorstore", reason="the extra `jax` is not installed")
pytest.importorskip("msgpack", reason="the extra `jax` is not installed")

LAYOUTS = ("standard", "folders", "zarr3", "zarr3_folders", "managed", "single", "v1", "sharded", "flax.msgpack")
# model → its --input
MODELS = {"cnn": "x:float32:batch,3,12,12", "block": "ids:int64:batch,seq", "mlp": "x:float32:batch,16"}
RULES = {
    "cnn": r"""rules:
- {match: 'params\.Conv_(\d)\.kernel', to: 'convs.\1.weight', steps: [{transpose: [3, 2, 0, 1]}]}
- {match: 'params\.Conv_(\d)\.bias', to: 'convs.\1.bias'}
- {match: 'params\.BatchNorm_(\d)\.scale', to: 'norms.\1.weight'}
- {match: 'params\.BatchNorm_(\d)\.bias', to: 'norms.\1.bias'}
- {match: 'batch_stats\.BatchNorm_(\d)\.(mean|var)', to: 'norms.\1.running_\2'}
- {match: 'params\.Dense_0\.kernel', to: hidden.weight, steps: [{transpose: [1, 0]}]}
- {match: 'params\.Dense_0\.bias', to: hidden.bias}
- {match: 'params\.Dense_1\.kernel', to: classes.weight, steps: [{transpose: [1, 0]}]}
- {match: 'params\.Dense_1\.bias', to: classes.bias}
keep: ['.*num_batches_tracked']
""",
    "block": r"""rules:
- {match: 'params\.token_embed\.embedding', to: token_embedding.weight}
- {match: 'params\.norm(.)\.scale', to: 'norm_\1.weight'}
- {match: 'params\.norm(.)\.bias', to: 'norm_\1.bias'}
- match: 'params\.attention\.(.)[a-z]*\.kernel'
  to: 'attn.\1_proj.weight'
  steps: [{reshape: [16, 16]}, {transpose: [1, 0]}]
- {match: 'params\.attention\.(.)[a-z]*\.bias', to: 'attn.\1_proj.bias', steps: [{reshape: [-1]}]}
- {match: 'params\.(up|down)\.kernel', to: 'fc_\1.weight', steps: [{transpose: [1, 0]}]}
- {match: 'params\.(up|down)\.bias', to: 'fc_\1.bias'}
- {match: 'step', drop: true}
""",
    "mlp": r"""rules:
- {match: 'up\.kernel(\.value)?', to: first.weight, steps: [{transpose: [1, 0]}]}
- {match: 'up\.bias(\.value)?', to: first.bias}
- {match: 'norm\.scale(\.value)?', to: bn.weight}
- {match: 'norm\.bias(\.value)?', to: bn.bias}
- {match: 'norm\.(mean|var)(\.value)?', to: 'bn.running_\1'}
- {match: 'down\.kernel(\.value)?', to: last.weight, steps: [{transpose: [1, 0]}]}
- {match: 'down\.bias(\.value)?', to: last.bias}
keep: [bn.num_batches_tracked]
""",
}
FACTORIES = {"cnn": "jaxlikes:Cnn", "block": "jaxlikes:Block", "mlp": "jaxlikes:Mlp"}


@pytest.fixture(scope="module")
def written(environment: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that ``jaxmodels.py`` writes."""
    root = tmp_path_factory.mktemp("jax") / "written"
    script = Path(__file__).with_name("jaxmodels.py")
    subprocess.run([str(environment("jax")), str(script), str(root)], check=True, capture_output=True, timeout=300)
    return root


def _leaves(root: Path, model: str) -> dict[str, np.ndarray]:
    return dict(np.load(root / model / "leaves.npz"))


def _same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    bits = {name: a.view(np.uint16) if a.dtype == ml_dtypes.bfloat16 else a for name, a in found.items()}
    assert sorted(bits) == sorted(wanted)
    for name, array in wanted.items():
        assert (bits[name].dtype, bits[name].shape) == (array.dtype, array.shape), name
        assert bits[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_bit_for_bit(written: Path, tmp_path: Path, model: str, layout: str) -> None:
    path = written / model / layout
    if layout.endswith(".msgpack"):
        found = read_flax(path)
    else:
        found, others, _ = read_item(locate(path, None, None), lambda _: True, tmp_path)
        assert others == []
    _same(found, _leaves(written, model))


def test_an_nnx_state_has_its_variables_under_value(written: Path, tmp_path: Path) -> None:
    found, _, _ = read_item(written / "mlp" / "nnx_state", lambda _: True, tmp_path)
    assert all(name.endswith(".value") for name in found)
    _same({name.removesuffix(".value"): array for name, array in found.items()}, _leaves(written, "mlp"))


def test_an_older_step_has_its_own_weights(written: Path, tmp_path: Path) -> None:
    found, _, _ = read_item(locate(written / "cnn" / "managed", 3, "weights"), lambda _: True, tmp_path)
    assert sorted(found) == sorted(_leaves(written, "cnn"))
    assert not any(array.any() for array in found.values())


def _convert(written: Path, model: str, layout: str, out: Path, *more: str | Path) -> Outcome:
    source, samples = written / model / layout, written / model / "samples.npz"
    out.parents[2].mkdir(parents=True, exist_ok=True)
    rules = out.parents[2] / f"{model}.yaml"
    rules.write_text(RULES[model])
    given = ["--map", rules, "--samples", samples]
    arguments = ["--model", FACTORIES[model], "--input", MODELS[model], *given, "--format", "onnx"]
    code = run([str(a) for a in ("checkpoint", source, *arguments, "--no-report", *more, "--out", out)])
    return Outcome(code, "", "")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("cnn", "standard"), ("cnn", "managed"), ("block", "train_state"), ("block", "sharded"),
        ("mlp", "nnx_state"), ("mlp", "zarr3"), ("mlp", "flax.msgpack"),
    ],
)  # fmt: skip
def test_samples_from_flax_confirm_the_model_and_match_the_artifacts_outputs(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, layout: str
) -> None:
    """Rules map the leaves, the samples hold Flax's outputs, and restore returns Flax's own leaves."""
    out = tmp_path / "repository" / model / "1"
    done = _convert(written, model, layout, out)
    said = capsys.readouterr()
    assert done.code == 0, said.err
    assert "the expected outputs are confirmed" in " ".join(said.out.split())
    samples = dict(np.load(written / model / "samples.npz"))
    artifact = Artifact.open(out)
    expected = {entry.name: samples.pop(entry.name) for entry in artifact.manifest.outputs}
    reference, cpu = load_reference(artifact).run(samples), load(artifact, "cpu").run(samples)
    for name, own in expected.items():
        assert np.linalg.norm(reference[name] - own) < 1e-5 * np.linalg.norm(own)
        assert np.linalg.norm(cpu[name] - own) < 1.5e-2 * np.linalg.norm(own)
    assert run(["restore", str(out), "--out", str(tmp_path / "fp32.safetensors")]) == 0
    restored = load_file(tmp_path / "fp32.safetensors")
    restored.pop("step", None)
    _same({name.removesuffix(".value"): array for name, array in restored.items()}, _leaves(written, model))
