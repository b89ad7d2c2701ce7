"""The tabular model: a scaler and a small network for rows of numbers, trained here and exported by skl2onnx."""

from pathlib import Path


def export(path: Path) -> Path:
    """Train on 1,200 scanned digits of scikit-learn, and write the pipeline as ONNX to ``path``, without ZipMap."""
    from skl2onnx import to_onnx
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = load_digits()
    network = MLPClassifier((64, 32), max_iter=60, tol=1e-2, random_state=0)
    pipeline = make_pipeline(StandardScaler(), network).fit(table.data[:1200], table.target[:1200])
    model = to_onnx(pipeline, table.data[:1].astype("float32"), options={"zipmap": False}, target_opset=18)
    path.write_bytes(model.SerializeToString())
    return path
