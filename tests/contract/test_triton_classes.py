"""Triton's classes, asked for by an unmodified tritonclient; the conformance suite has the rest of the extensions."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from inprocess import running


@pytest.mark.long
def test_classes_of_an_output_are_returned_with_their_labels(tmp_path: Path) -> None:
    write_mlp(tmp_path / "classes" / "1", logits=True)
    (tmp_path / "classes" / "labels.txt").write_text("tabby\ntiger cat\n")
    (tmp_path / "classes" / "serving.yaml").write_text("labels: {y: labels.txt}\n")
    x = triton.InferInput("x", [2, 16], "FP32")
    x.set_data_from_numpy(np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16))
    with running(tmp_path, "classes") as address, triton.InferenceServerClient(address) as client:
        values = client.infer("classes", [x]).as_numpy("y")
        answer = client.infer("classes", [x], outputs=[triton.InferRequestedOutput("y", class_count=16)])
        best = client.infer("classes", [x], outputs=[triton.InferRequestedOutput("y", class_count=1)]).as_numpy("y")
    classes = answer.as_numpy("y")
    assert (answer.get_output("y").datatype, classes.shape) == ("BYTES", (2, 16))
    for row, expected in zip(classes, values, strict=True):
        parts = [entry.decode().split(":") for entry in row]
        assert [int(part[1]) for part in parts] == np.argsort(-expected, kind="stable").tolist()
        np.testing.assert_allclose([float(part[0]) for part in parts], np.sort(expected)[::-1], atol=1e-6)
        labels = {int(part[1]): part[2:] for part in parts}
        assert labels.pop(0) == ["tabby"]
        assert labels.pop(1) == ["tiger cat"]
        assert set(map(len, labels.values())) == {0}
    np.testing.assert_array_equal(best, classes[:, :1])
