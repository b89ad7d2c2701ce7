"""A TorchScript file with a branch on its input values, end to end.

The file is converted to TorchScript only and served; the test compares both branches with the outputs of the file
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from scriptedmodels import Deciding, save

from converter.cli import run

Serve = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own


@pytest.mark.long
def test_a_torchscript_only_model_is_served_with_outputs_close_to_the_file(tmp_path: Path, serve: Serve) -> None:
    path = save(tmp_path / "m.pt", Deciding(), torch.ones(2, 16))
    models = tmp_path / "models"
    target = models / "model" / "1"
    arguments = ["--input", "x:float32:batch,16", "--out", str(target), "--no-report", "--trust-code"]
    assert run(["checkpoint", str(path), *arguments]) == 0
    server = serve("--repository", str(models), "--device", "cpu").wait_ready()
    itself: Any = torch.jit.load(str(path))  # type: ignore[no-untyped-call]  # torch's own
    random = np.random.default_rng(1).standard_normal((6, 16)).astype(np.float32)
    with triton.InferenceServerClient(server.target) as client:
        for x in (np.abs(random), -np.abs(random)):
            tensor = triton.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            answer = client.infer("model", [tensor]).as_numpy("output")
            with torch.no_grad():
                expected = itself(torch.from_numpy(x)).numpy()
            assert 0 < np.linalg.norm(answer - expected) / np.linalg.norm(expected) < 1e-2
    info = [line for line in server.get("/metrics")[1].splitlines() if line.startswith("bf16kit_model_info{")]
    assert len(info) == 1
    assert 'profile="torchscript"' in info[0]
    assert 'accumulation="fp32"' in info[0]
