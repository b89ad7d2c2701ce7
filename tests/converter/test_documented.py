"""The commands in docs/converting.md's table run as written there. ``tests/sources`` tests TensorFlow's."""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import exportedfiles
import lightningfiles
import numpy as np
import onnx
import orbaxfiles
import pytest
import scriptedmodels
import torch
from architectures import Mlp, save, seeded
from converting import Cli
from documented import DOCS, PACKAGE, Answers, Maker, assert_answers, command, row, rows, write_package
from flaxfiles import MLP_RULES, mlp_params, packed
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter import cli as program
from bf16kit.converter.process.quiet import quiet
from bf16kit.service import cli as server

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
ELSEWHERE = {row("TensorFlow SavedModel"), row("Keras 3 file")}  # tests/sources/test_tensorflow.py


def _answers(module: torch.nn.Module | None = None, name: str = "output") -> Answers:
    with torch.no_grad():
        return Answers({"x": X.numpy()}, {name: (module or seeded(Mlp()))(X).numpy()})


def _factories(directory: Path) -> None:
    write_package(directory, mod="from architectures import Mlp\n\nfactory = LitOrPlainModule = Mlp\n")


def _onnx(directory: Path) -> Answers:
    model = graphs.mlp()
    onnx.save(graphs.mlp(), directory / "model.onnx", save_as_external_data=True, size_threshold=0)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)}
    (output,) = ReferenceEvaluator(model).run(None, feeds)
    return Answers(feeds, {model.graph.output[0].name: output})


def _hugging_face(directory: Path) -> Answers:
    import transformers

    config: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with quiet(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**config))
        model.train(False)
        model.save_pretrained(directory / "DIRECTORY")
        feeds = {name: torch.ones((2, 7), dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        feeds["token_type_ids"] = torch.zeros((2, 7), dtype=torch.int64)
        output = model(**feeds).logits.numpy()
    return Answers({name: feed.numpy() for name, feed in feeds.items()}, {"logits": output})


def _safetensors(directory: Path) -> Answers:
    _factories(directory)
    save_file(seeded(Mlp()).state_dict(), directory / "model.safetensors")
    return _answers()


def _exported(directory: Path) -> Answers:
    (directory / "model.pt2").write_bytes(exportedfiles.exported(seeded(Mlp()), X))
    return _answers()


def _state_dict(directory: Path) -> Answers:
    _factories(directory)
    save(directory / "model.pt", Mlp())
    return _answers()


def _lightning(directory: Path) -> Answers:
    _factories(directory)
    lightningfiles.written(directory / "m.ckpt", lightningfiles.state("model."))
    return _answers()


def _scripted(directory: Path) -> Answers:
    scriptedmodels.save(directory / "m.pt", Mlp(), X)
    return _answers()


def _orbax(directory: Path) -> Answers:
    pytest.importorskip("tensorstore", reason="the extra `jax` is not installed")
    _factories(directory)
    flat = {f"params.{layer}.{leaf}": array for layer, leaves in mlp_params().items() for leaf, array in leaves.items()}
    orbaxfiles.write(directory / "DIRECTORY" / "20" / "default", flat)
    found = _answers()
    np.savez(directory / "expected.npz", **found.inputs, **found.outputs)
    shutil.copy(MLP_RULES, directory / "rules.yaml")
    return found


def _flax(directory: Path) -> Answers:
    pytest.importorskip("msgpack", reason="the extra `jax` is not installed")
    (directory / "m.msgpack").write_bytes(packed({"params": mlp_params()}))
    with quiet():
        # `optimize` would spoil torch's table of operators, which conftest caches, for the next export.
        program = torch.onnx.export(
            Mlp().eval(),
            (X,),
            input_names=["x"],
            output_names=["output"],
            dynamic_shapes=({0: "batch"},),
            optimize=False,
        )
    assert program is not None
    onnx.save(program.model_proto, directory / "graph.onnx")
    shutil.copy(MLP_RULES, directory / "rules.yaml")
    return _answers()


MAKERS: Mapping[str, Maker] = {
    row("ONNX"): _onnx,
    row("Hugging Face"): _hugging_face,
    row("safetensors"): _safetensors,
    row("torch.export"): _exported,
    row("torch state dict"): _state_dict,
    row("Lightning"): _lightning,
    row("TorchScript"): _scripted,
    row("Orbax"): _orbax,
    row("Flax"): _flax,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a new working directory; afterwards, remove its ``pkg`` from the imported modules."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_every_row_of_the_table_has_a_test() -> None:
    assert set(rows()) == {*MAKERS, *ELSEWHERE}


@pytest.mark.long  # nine conversions with every format and the report
@pytest.mark.parametrize("source", MAKERS)
def test_the_command_of_a_row_runs_as_written(cli: Cli, here: Path, source: str) -> None:
    expected = MAKERS[source](here)
    cli(*command(source)).published()
    assert_answers(Artifact.open(here / "REPOSITORY" / "MODEL" / "1"), expected)


def _mentioned(page: str) -> set[str]:
    """Return every option in a code span or a code block of a page."""
    code = re.findall(r"```.*?```|`[^`]+`|^    .*$", page, re.DOTALL | re.MULTILINE)
    return {flag for text in code for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)}


def _options() -> set[str]:
    """Return every option of every command of the converter, and those of the server."""
    known = [option for each in (*program.command.commands.values(), server.main) for option in each.params]
    return {"--help", "--version", *(flag for option in known for flag in (*option.opts, *option.secondary_opts))}


@pytest.mark.parametrize("page", ["converting.md", "recovering.md", "models.md"])
def test_every_option_that_a_page_names_exists(page: str) -> None:
    found = _mentioned((DOCS / page).read_text("utf-8"))
    assert found
    assert found - _options() == set()
