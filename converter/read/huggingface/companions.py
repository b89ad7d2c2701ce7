"""Files of a Hugging Face directory that are needed to use its weights: config.json and the preprocessors' files.

They are copied by name, never executed. Python files and all others are not copied; a note names those that a model may
need.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import first_few, quoted
from converter.read.huggingface.model_directory import Directory

LARGEST = 64 << 20  # bytes of one file; the largest tokenizers today have 35 MB
# Settings of generation, tokenizers, preprocessors (images, sound, video); vocabularies; what licences require.
_COPIED = re.compile(
    r"(generation|tokenizer|processor|preprocessor|image_processor|video_preprocessor|feature_extractor)_config\.json"
    r"|(tokenizer|special_tokens_map|added_tokens|normalizer|chat_template)\.json|[\w-]*vocab[\w-]*\.(json|txt)"
    r"|merges\.txt|bpe\.codes|[\w.-]+\.(model|spm|jinja)|LICENSE(\.txt|\.md)?|NOTICE"
)
# Weights in any framework's format, which are exported; their indexes; and files that no program loads.
_NOT_NEEDED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|ot|tflite|gguf|index\.json|md|png|jpe?g|gif|svg|pdf)"
    r"|(README|LICENSE|NOTICE|USE_POLICY)(\..*)?|(training_args|optimizer|scheduler)\..*|trainer_state\.json|modules\.json"
    r"|config\.json|\..*"
)
_DTYPES = ("dtype", "torch_dtype")  # transformers 5 reads the first one, and older releases know only the second


def companions(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the files to put beside exported weights of the directory at ``path``, and a note on others.

    Its config.json says bfloat16. Raises :class:`SourceError` for a file larger than :data:`LARGEST`, and for a link
    out of the directory.
    """
    root = Directory.open(path).path
    names = sorted(entry.name for entry in root.iterdir() if entry.is_file())
    copied = [name for name in names if _COPIED.fullmatch(name)]
    config = _with_bf16_dtypes(json.loads(_content(root, "config.json"))) | dict.fromkeys(_DTYPES, "bfloat16")
    found = {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    left = [quoted(name) for name in names if name not in copied and not _NOT_NEEDED.fullmatch(name)]
    note = (
        f"not copied beside the exported weights: {first_few(left, 10)}; copy those that are needed to load the model"
    )
    return found | {name: _content(root, name) for name in copied}, [note] if left else []


def _with_bf16_dtypes(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with bfloat16 wherever it, or a part of it, states a dtype."""
    changed = {key: _with_bf16_dtypes(value) if isinstance(value, dict) else value for key, value in config.items()}
    return changed | {key: "bfloat16" for key in _DTYPES if isinstance(config.get(key), str)}


def _content(root: Path, name: str) -> bytes:
    """Return a file inside the directory or, in the Hub's cache, among the model's blobs."""
    real, home = (root / name).resolve(), root.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(allowed) for allowed in (home, *blobs)):
        raise SourceError(
            f"{root / name}: a link out of the directory, to {real}; replace the link with the file to export it"
        )
    return read_bounded(root / name, LARGEST, SourceError, "more than any tokenizer or config has")
