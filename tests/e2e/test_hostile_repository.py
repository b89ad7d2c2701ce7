"""Models whose files are made to freeze a server, or to have it read other files: the rest is served."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from serverprocess import Serve
from waiting import until

from bf16kit.artifact.manifest import MANIFEST

# By model: what the log says of it.
SAID = {
    "aliases": r"serving.yaml: line 2: *a0 is an alias: write the value itself there",
    "labels": r"'labels.y': 'labels.txt': a link out of ",
    "lists": "larger than 64 MiB, not a manifest",
    "serving": "serving.yaml: a link out of ",
}


def _write(model: Path) -> None:
    write_mlp(model / "1")
    if model.name == "aliases":
        levels = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 8))
        (model / "serving.yaml").write_text("a0: &a0 [0, 0]\n" + "".join(levels) + "max_batch_size: *a7\n")
    elif model.name == "labels":
        (model / "serving.yaml").write_text("labels: {y: labels.txt}\n")
        (model / "labels.txt").symlink_to("/etc/passwd")
    elif model.name == "serving":
        (model / "serving.yaml").symlink_to("/etc/passwd")
    else:
        _replace_options(model / "1" / MANIFEST, f"[{'[],' * 23_000_000}0]")


def _replace_options(manifest: Path, value: str) -> None:
    """Write the manifest anew with ``value`` among its options, and the right digest."""
    fields = json.loads(manifest.read_bytes()) | {"options": {"a": "@"}, "digest": "0" * 64}
    text = json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    data = text.replace('"@"', value).encode()
    manifest.write_bytes(data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1))


@pytest.mark.long
def test_models_with_hostile_files_are_rejected_with_a_reason_and_the_others_are_served(
    tmp_path: Path, serve: Serve
) -> None:
    write_mlp(tmp_path / "models" / "good" / "1")
    for name in SAID:
        _write(tmp_path / "models" / name)
    server = serve("--repository", tmp_path / "models", "--device", "cpu")
    until(lambda: all(text in server.log for text in SAID.values()), 60, "a reason for each")
    with triton.InferenceServerClient(server.target) as client:
        until(lambda: client.is_model_ready("good"), 60, "the good model")
        assert server.infer("good", {"x": np.ones((1, 16), np.float32)})["y"].shape == (1, 16)
        assert not any(client.is_model_ready(name) for name in SAID)
    assert "Traceback" not in server.log
    assert max(map(len, server.lines)) < 2000
    server.check_memory()
