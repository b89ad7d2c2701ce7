"""Files of a Hugging Face directory that are needed to use its weights: config.json and the preprocessors' files.

They are copied by name, never executed. Python files and all others are not copied; a note names those that a model may
need.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import SourceError
from bf16kit.messages.text import listed
from bf16kit.messages.wording import quoted
from converter.read.huggingface.directory import Directory

LARGEST = 64 << 20  # bytes of one file; the largest tokenizers today have 35 MB
_NAMES = (
    "generation_config.json",
    # tokenizers
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "merges.txt",
    "bpe.codes",
    "entity_vocab.json",
    "normalizer.json",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "source.spm",
    "target.spm",
    "spiece.model",
    "spm.model",
    "spm_char.model",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    # images, sound, video
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    # required by the license of the weights
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)
# Weights in any framework's format, which are exported; their indexes; and files that no program loads.
_NOT_NEEDED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|ot|tflite|gguf|index\.json|md|png|jpe?g|gif|svg|pdf)"
    r"|(README|LICENSE|NOTICE|USE_POLICY)(\..*)?|(training_args|optimizer|scheduler)\..*|trainer_state\.json|modules\.json"
)
_SHOWN = 10
_DTYPES = ("dtype", "torch_dtype")


def companions(path: Path) -> dict[str, bytes]:
    """Return the files to put beside exported weights of the directory at ``path``, by name; config.json says bfloat16.

    Raises :class:`SourceError` for a file that is larger than :data:`LARGEST`, or a link out of the directory.
    """
    root = Directory.open(path).path
    config = json.loads(_content(root, "config.json"))
    found = {"config.json": (json.dumps(in_bf16(config), indent=2, sort_keys=True) + "\n").encode()}
    return found | {name: _content(root, name) for name in _NAMES if (root / name).is_file()}


def uncopied_files_note(path: Path) -> tuple[str, ...]:
    """Return a note on files that :func:`companions` does not copy but a model may need, such as code."""
    root = Directory.open(path).path
    names = sorted(
        entry.name
        for entry in root.iterdir()
        if entry.is_file() and not entry.name.startswith(".") and not _NOT_NEEDED.fullmatch(entry.name)
    )
    left = [quoted(name) for name in names if name not in _NAMES and name != "config.json"]
    if not left:
        return ()
    shown = [*left[:_SHOWN], *([f"{len(left) - _SHOWN} more"] if len(left) > _SHOWN else [])]
    return (f"not copied beside the exported weights: {listed(shown)}; copy those that are needed to load the model",)


def in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with bfloat16 as the dtype to load the model in; also in its parts that state a dtype.

    transformers 5 reads ``dtype`` first and older releases know only ``torch_dtype``, so both are written.
    """
    return _with_bf16_dtypes(config) | dict.fromkeys(_DTYPES, "bfloat16")


def _with_bf16_dtypes(config: dict[str, Any]) -> dict[str, Any]:
    changed = {key: _with_bf16_dtypes(value) if isinstance(value, dict) else value for key, value in config.items()}
    return changed | {key: "bfloat16" for key in _DTYPES if isinstance(config.get(key), str)}


def _content(root: Path, name: str) -> bytes:
    path = root / name
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root_directory) for root_directory in _allowed_roots(root)):
        raise SourceError(
            f"{path}: a link out of the directory, to {real}; replace the link with the file to export it"
        )
    return read_bounded(path, LARGEST, SourceError, "more than any tokenizer or config has")


def _allowed_roots(root: Path) -> Iterator[Path]:
    """Yield where files of the directory may be: inside it or, in the Hub's cache, among the model's blobs."""
    real = Path(os.path.realpath(root))
    yield real
    if real.parent.name == "snapshots":
        yield real.parent.parent / "blobs"
