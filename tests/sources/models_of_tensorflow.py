"""Make the test models in TensorFlow's own Python, with TensorFlow's outputs and stored variables.

``python models_of_tensorflow.py DIRECTORY NAME…`` writes into ``DIRECTORY/NAME`` the file ``model`` (or
``model.keras``), ``feeds.npz``, for each signature ``answers-SIGNATURE.npz``, and ``variables.npz`` and ``names.json``
as TensorFlow's own readers give them. Models of Keras 2 need a process of their own.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
DIRECTORY, NAMES = Path(sys.argv[1]), sys.argv[2:]
if NAMES[0].startswith("keras2"):
    os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np  # noqa: E402 - reads the environment set above
import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf import trackable_object_graph_pb2  # noqa: E402

MODEL = Path("model")  # each model is made in its own directory


def keras_cnn() -> dict[str, Any]:
    """Make a classifier of all common kinds of convolutions, BatchNorm and pooling, exported in the usual way."""
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((16, 16, 3), name="image")
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.SeparableConv2D(24, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="gelu")(x)
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    model = tf.keras.Model(inputs, layers.Dense(10, name="logits")(x))
    _settle_statistics(model)
    model.export(MODEL, verbose=False)
    return {"image": _values(8, 16, 16, 3)}


def keras_file() -> dict[str, Any]:
    """Make a .keras file with a recurrent layer, attention and an embedding."""
    layers = tf.keras.layers
    ids = tf.keras.Input((12,), dtype="int32", name="ids")
    x = layers.Embedding(50, 32)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
    x = layers.Bidirectional(layers.LSTM(16))(x)
    model = tf.keras.Model(ids, layers.Dense(5)(x))
    model.save("model.keras")
    feeds = {"ids": np.random.default_rng(0).integers(0, 50, (8, 12)).astype(np.int32)}
    _save("answers-serving_default.npz", {"output_0": model(feeds["ids"]).numpy()})
    _save("feeds.npz", feeds)
    tf.keras.backend.clear_session()  # otherwise Keras continues its numbering of names: seed_generator_3
    tf.keras.models.load_model("model.keras").export(MODEL, verbose=False)  # its variables have Keras' names
    return {}


def keras_lambda() -> dict[str, Any]:
    """Make a .keras file with a layer that is Python code."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((16,), name="x")
    hidden = layers.Lambda(lambda x: x * 2.0, output_shape=(16,))(layers.Dense(16)(inputs))
    model = tf.keras.Model(inputs, layers.Dense(4)(hidden))
    model.save("model.keras")
    model.export(MODEL, verbose=False)
    return {"x": _values(8, 16)}


def keras2_trained() -> dict[str, Any]:
    """Make a model of Keras 2, saved with its optimizer's slots (tf2onnx's own loader fails on `add_slot`)."""
    import tf_keras

    model = tf_keras.Sequential(
        [tf_keras.layers.Input((16,)), tf_keras.layers.Dense(32, activation="tanh"), tf_keras.layers.Dense(4)]
    )
    model.compile(tf_keras.optimizers.legacy.Adam(), "mse")
    model.fit(_values(32, 16), _values(32, 4, seed=1), epochs=1, verbose=0)
    model.save(MODEL, save_format="tf")
    return {"input_1": _values(8, 16)}


class Several(tf.Module):
    """Two signatures that share a variable, one variable that only the second uses, and a table that neither needs."""

    def __init__(self) -> None:
        self.kernel = tf.Variable(_values(16, 32), name="kernel")
        self.bias = tf.Variable(_values(32, seed=1), name="bias")
        self.head = tf.Variable(_values(32, 4, seed=2), name="head")
        self.steps = tf.Variable(3, dtype=tf.int64, name="steps", trainable=False)
        words = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        self.words = tf.lookup.StaticHashTable(words, -1)

    @tf.function(input_signature=[tf.TensorSpec((None, 16), tf.float32, name="x")])
    def embed(self, x: Any) -> Any:
        return {"embedding": tf.nn.relu(x @ self.kernel + self.bias)}

    @tf.function(input_signature=[tf.TensorSpec((None, 16), tf.float32, name="x"), tf.TensorSpec((), tf.float32)])
    def classify(self, x: Any, temperature: Any) -> Any:
        hidden = self.embed(x)["embedding"]
        if tf.reduce_sum(hidden) > 0:  # control flow that stays in the graph
            hidden = hidden * 1.0
        logits = hidden @ self.head / temperature
        return {"logits": logits, "again": logits, "x": tf.nn.softmax(logits)}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="words")])
    def look_up(self, words: Any) -> Any:
        return {"numbers": self.words.lookup(words)}


def module() -> dict[str, Any]:
    """Make a tf.Module with several signatures."""
    made = Several()
    signatures = {"embed": made.embed, "classify": made.classify, "look_up": made.look_up}
    tf.saved_model.save(made, str(MODEL), signatures=signatures)
    return {"x": _values(8, 16), "temperature": np.float32(2.0)}


def version1() -> dict[str, Any]:
    """Make a SavedModel of TensorFlow 1: variables of a graph, a saver, no functions."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (None, 16), name="x")
        with v1.variable_scope("layer"):
            kernel = v1.get_variable("kernel", initializer=_values(16, 32), use_resource=False)
        y = tf.nn.relu(tf.matmul(x, kernel), name="y")
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(MODEL), {"x": x}, {"y": y})
    return {"x": _values(8, 16)}


def mixed_precision() -> dict[str, Any]:
    """Make a model whose policy is to compute in bfloat16; the converter rejects it."""
    layers = tf.keras.layers
    computed = [layers.Dense(width, dtype="mixed_bfloat16") for width in (8, 2)]
    tf.keras.Sequential([layers.Input((16,)), *computed]).export(MODEL, verbose=False)
    return {}


def runs_python() -> dict[str, Any]:
    """Make a signature that calls back into Python; the converter rejects it by the operator's name."""

    class Calls(tf.Module):
        def __init__(self) -> None:
            self.w = tf.Variable(_values(16, 16))

        @tf.function(input_signature=[tf.TensorSpec((None, 16), tf.float32, name="x")])
        def call(self, x: Any) -> Any:
            return {"y": tf.ensure_shape(tf.numpy_function(np.sort, [x @ self.w], tf.float32), (None, 16))}

    made = Calls()
    tf.saved_model.save(made, str(MODEL), signatures=made.call)
    return {}


def _settle_statistics(model: Any) -> None:
    """Set BatchNorm's moving statistics to values as after training, not 0 and 1."""
    random = np.random.default_rng(7)
    for variable in model.non_trainable_variables:
        if variable.dtype == "float32":
            variable.assign(random.uniform(0.5, 1.5, variable.shape).astype(np.float32))


def _values(*shape: int, seed: int = 0) -> Any:
    scale = np.sqrt(shape[0]) if len(shape) == 2 else 1.0
    return (np.random.default_rng(seed).standard_normal(shape) / scale).astype(np.float32)


def _save(path: str, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def _answers(feeds: dict[str, Any]) -> None:
    """Write the outputs of TensorFlow's own loader for each signature that takes these feeds."""
    _save("feeds.npz", feeds)
    loaded = tf.saved_model.load(str(MODEL))
    for name, signature in loaded.signatures.items():
        wanted = signature.structured_input_signature[1]
        if set(wanted) <= set(feeds):
            given = {key: tf.constant(feeds[key]) for key in wanted}
            _save(f"answers-{name}.npz", {key: value.numpy() for key, value in signature(**given).items()})


def _variables() -> None:
    reader = tf.train.load_checkpoint(str(MODEL / "variables" / "variables"))
    names = [name for name, dtype in reader.get_variable_to_dtype_map().items() if dtype != tf.string]
    _save("variables.npz", {name: reader.get_tensor(name) for name in names})
    called = {}
    if reader.has_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"):
        objects = trackable_object_graph_pb2.TrackableObjectGraph()
        objects.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
        called = {found.checkpoint_key: found.full_name for node in objects.nodes for found in node.attributes}
    Path("names.json").write_text(json.dumps(called))


MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    maker.__name__: maker
    for maker in (keras_cnn, keras_file, keras_lambda, keras2_trained, module, version1, mixed_precision, runs_python)
}

if __name__ == "__main__":
    for each in NAMES:
        tf.keras.backend.clear_session()  # otherwise Keras continues its numbering of names: conv2d_1
        here = DIRECTORY / each
        here.mkdir(parents=True)
        with chdir(here):
            its_feeds = MAKERS[each]()
            if its_feeds:
                _answers(its_feeds)
            _variables()
