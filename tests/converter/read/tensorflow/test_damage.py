"""Hundreds of damaged SavedModels: the checks before TensorFlow starts end in one short error, or pass."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import savedmodels
from fuzzing import bytewise
from savedmodels import entry, table

from bf16kit.messages.errors import ConversionError, SourceError, UsageError
from converter.read.tensorflow import bundle, savedmodel
from converter.read.tensorflow.messages import message

_FILES = ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001")
_LONGEST = 600  # characters of a message
_MEMORY = 64 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return savedmodels.write(tmp_path / "m", tensors=savedmodels.many(8))


def _look(model: Path) -> None:
    """Run the checks that precede TensorFlow, and read every value that they return."""
    said = ""
    try:
        savedmodel.choose(model, None)
        for array in bundle.read(model / "variables" / "variables").tensors.values():
            array.tobytes()
    except (SourceError, ConversionError, UsageError) as error:
        said = str(error)
    assert len(said) < _LONGEST + 4 * len(str(model)), said


def _within(memory: int, action: Callable[[], None]) -> None:
    tracemalloc.start()
    try:
        action()
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("edit", bytewise.EDITS, ids=lambda edit: edit.__name__)
def test_damaged_bytes_give_a_short_error_or_none(model: Path, name: str, edit: bytewise.Edit) -> None:
    whole = (model / name).read_bytes()

    def all_of_them() -> None:
        for seed in range(40):
            (model / name).write_bytes(edit(whole, Random(f"{name} {edit.__name__} {seed}")))
            _look(model)

    _within(_MEMORY, all_of_them)


@pytest.mark.long
def test_extreme_numbers_in_an_index_with_valid_checksums_give_a_short_error(model: Path) -> None:
    index = model / "variables" / "variables.index"
    header = message("BundleHeader")(num_shards=1).SerializeToString()

    def all_of_them() -> None:
        random = Random(0)
        numbers = [number % 2**62 for number in bytewise.EXTREMES] + [-1, -(2**62)]
        for _ in range(500):
            shape = [random.choice(numbers) for _ in range(random.randint(0, 4))]
            said = entry(
                random.choice((1, 3, 7, 9, 14, 19, 23, 100, 2**31 - 1, -1)),
                shape,
                random.choice(numbers),
                random.choice((*numbers, 4, 16)),
                random.choice((0, 1, -1, 2**31 - 1)),
            )
            index.write_bytes(table({b"": header, b"w": bytewise.overwrite(said.SerializeToString(), random)}))
            _look(model)
            index.write_bytes(table({b"": header, b"w": said.SerializeToString()}))
            _look(model)

    _within(_MEMORY, all_of_them)


def test_tens_of_thousands_of_nodes_and_functions_are_checked_in_seconds(tmp_path: Path) -> None:
    """A chain of calls and many readers of one input need neither recursion nor quadratic time."""
    count = 20_000
    nodes = [savedmodels.node("x", "Placeholder")]
    nodes += [savedmodels.node(f"n{k}", "Relu", f"n{k - 1}" if k else "x", "x") for k in range(count)]
    functions = {f"f{k}": [savedmodels.node("c", "PartitionedCall", call=f"f{k + 1}")] for k in range(count)}
    nodes.append(savedmodels.node("y", "PartitionedCall", f"n{count - 1}", call="f0"))
    signature = {"serving_default": ({"x": savedmodels.tensor("x:0", 1)}, {"y": savedmodels.tensor("y:0", 1)})}
    path = savedmodels.write(tmp_path / "m", savedmodels.meta_graph(nodes, signature, functions=functions))
    assert savedmodel.choose(path, None).outputs == {"y": "y:0"}


def test_the_undamaged_model_is_accepted(model: Path) -> None:
    assert savedmodel.choose(model, None).signature == "serving_default"
    found = bundle.read(model / "variables" / "variables").tensors
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: np.ascontiguousarray(array).tobytes() for name, array in savedmodels.many(8).items()
    }
