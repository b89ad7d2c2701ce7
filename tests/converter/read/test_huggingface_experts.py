"""A mixture of experts is exported as products that give what transformers' own loop over the chosen experts gives."""

from __future__ import annotations

from pathlib import Path

import hfzoo
import numpy as np
import pytest

from bf16kit.runtime.ort.onnx import OnnxRuntime
from converter.options import Options, parse_target
from converter.process.quiet import quiet
from converter.read import oracles
from converter.read.huggingface import load, module
from converter.read.huggingface.model_directory import Directory
from converter.read.signature import output_specs
from converter.read.torch.onnx_export import to_onnx
from converter.write.graphs import serialize


@pytest.mark.slow
def test_the_export_gives_the_outputs_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        directory = Directory.open(hfzoo.save("mixtral", tmp_path / "mixtral"))
    tensors, _ = directory.tensors()
    model, sampler, _ = load(
        Options(source=directory.path, target=parse_target(tmp_path / "m" / "1")), directory, tensors
    )
    assert sampler is not None
    feeds = list(sampler(0, 2))
    with monkeypatch.context() as patched:
        patched.setattr(module, "_linear", None)  # the source's own answers come without our products
        expected = list(oracles.of_module(model).outputs(feeds))
    graph = to_onnx(model, tensors)
    runtime = OnnxRuntime(serialize(graph), model.inputs, output_specs(graph), precision="fp32")
    for feed, outputs in zip(feeds, expected, strict=True):
        np.testing.assert_allclose(runtime.run(feed)["logits"], outputs["logits"], rtol=1e-4, atol=1e-5)
