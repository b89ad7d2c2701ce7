"""The models for tritonclient's published examples. The examples are not in this repository (docs/conformance.md)."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from examplemodels import write_examples
from inprocess import running

pytestmark = pytest.mark.clients


def test_all_eight_models_serve(tmp_path: Path) -> None:
    write_examples(tmp_path)
    names = sorted(directory.name for directory in tmp_path.iterdir())
    with running(tmp_path, *names) as address, triton.InferenceServerClient(address) as client:
        assert len(client.get_model_repository_index().models) == 8
        numbers = [[str(i + j).encode() for i in range(16)] for j in (0, 1)]
        inputs = [triton.InferInput(f"INPUT{j}", [1, 16], "BYTES") for j in (0, 1)]
        for each, values in zip(inputs, numbers, strict=True):
            each.set_data_from_numpy(np.array([values], dtype=np.object_))
        answer = client.infer("simple_string", inputs)
        assert [int(value) for value in answer.as_numpy("OUTPUT0")[0]] == [2 * i + 1 for i in range(16)]
        assert client.get_model_config("image").config.input[0].format == 2  # NCHW
