"""Rules: the first full match counts, every leaf and tensor needs a place, and errors name what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bf16kit.converter.read.mapping import MapNeeded, MappedTensors, Shapes, fill
from bf16kit.messages.errors import SourceError, UsageError

W = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
MODEL = {"w": (8, 3), "b": (4,)}
LEAVES = {"p.w": W, "p.b": W[0, 0], "step": np.array(3)}
GOOD = [
    {"match": r"p\.w", "to": "w", "steps": [{"transpose": [0, 2, 1]}, {"reshape": [8, -1]}]},
    {"match": r"p\.(.)", "to": r"\1"},
    {"match": "step", "drop": True},
]


def _fill(tmp_path: Path, given: Any, leaves: dict[str, np.ndarray] = LEAVES, model: Shapes = MODEL) -> MappedTensors:
    path = tmp_path / "rules.yaml"
    path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    return fill(tmp_path / "m.msgpack", path, leaves, model, {"n"})


def test_leaves_are_transformed_step_by_step_and_the_order_of_axes_is_known_for_transposed_ones(tmp_path: Path) -> None:
    found = _fill(tmp_path, {"rules": GOOD})
    np.testing.assert_array_equal(found.tensors["w"], W.transpose(0, 2, 1).reshape(8, 3))
    np.testing.assert_array_equal(found.tensors["b"], W[0, 0])
    assert found.orders == {}  # reshaped or unchanged
    turned = [{"transpose": [1, 2, 0]}, {"transpose": [1, 2, 0]}]
    found = _fill(tmp_path, {"rules": [{"match": "w", "to": "w", "steps": turned}]}, {"w": W}, {"w": (4, 2, 3)})
    assert found.orders == {"w": (2, 0, 1)}


def test_a_tensor_may_keep_its_initial_value(tmp_path: Path) -> None:
    """One that the rules name, and one that is optional."""
    assert _fill(tmp_path, {"rules": GOOD, "keep": ["t"]}, model={**MODEL, "t": (8, 3), "n": ()}).kept == {"t"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({0: {"match": r"p\.w", "to": "w"}}, "p.w [2, 3, 4]: becomes [2, 3, 4], and w is [8, 3] in the model"),
        ({0: {"match": r"p\.w", "to": "w", "steps": [{"reshape": [5, -1]}]}}, "p.w [2, 3, 4]: cannot reshape array"),
        ({0: {"match": r"p\.w", "to": "x"}}, "p.w [2, 3, 4]: is sent to x, which the model lacks"),
        ({1: {"match": r"p\.b", "to": "w", "steps": []}}, "p.b [4]: is sent to w, which another leaf fills"),
        ({2: {"match": "steps?x", "drop": True}}, "no rule: step []"),
        ({1: {"match": r"p\.b", "drop": True}}, "missing: b [4]"),
    ],
)
def test_leaves_and_tensors_that_do_not_fit_are_named(tmp_path: Path, changed: dict[int, Any], said: str) -> None:
    with pytest.raises(SourceError) as refused:
        _fill(tmp_path, {"rules": [changed.get(index, rule) for index, rule in enumerate(GOOD)]})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1, 2", "is not YAML"),
        ({"rules": [], "rule": 1}, "rule: Extra inputs are not permitted"),
        (
            {"rules": [{"match": "(", "to": "w"}]},
            "rules.1.match: Input should be a valid regular expression",
        ),
        ({"rules": [GOOD[0], {"match": "w"}]}, "rules.2: expected either to: NAME or drop: true"),
        ({"rules": [{"match": "w", "to": "w", "steps": [{"flip": [1]}]}]}, "should be 'reshape' or 'transpose'"),
    ],
)
def test_an_invalid_file_of_rules_is_rejected(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        _fill(tmp_path, given)
    assert said in str(refused.value)
    assert "rules.yaml" in str(refused.value)


def test_a_group_that_the_pattern_lacks_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not fit match 'p\.\*': invalid group reference"):
        _fill(tmp_path, {"rules": [{"match": "p.*", "to": r"\2"}]})


def test_equal_names_and_shapes_need_no_rules(tmp_path: Path) -> None:
    leaves = {"w": np.zeros((8, 3)), "b": np.zeros(4)}
    assert fill(tmp_path, None, leaves, {**MODEL, "n": ()}, {"n"}) == (leaves, {}, frozenset())


@pytest.mark.parametrize("name", ["a'b", "a\nb", "a: {b}", "ünï", "*a", "a\\1", "# a", "\x1b[31m", "a\nrules: []"])
def test_the_template_lists_both_sides_and_is_a_file_of_rules_once_completed(tmp_path: Path, name: str) -> None:
    """Names that match already are filled in; whatever a name is, it can be written and read again."""
    model = {name: (4,), "w": (24,), "n": ()}
    leaves = {name: W[0, 0], "p.w": W}
    with pytest.raises(MapNeeded, match="1 of its 2 leaves match no tensor of the model by name and shape") as needed:
        fill(tmp_path / "m.msgpack", None, leaves, model, {"n"})
    text = needed.value.template
    assert "# p.w [2, 3, 4]    w [24]" in text.splitlines()
    assert text.count("to: ''") == 1
    completed = text.replace("to: '', steps: []", "to: w, steps: [{reshape: [-1]}]")
    found = _fill(tmp_path, completed, leaves, model)
    assert set(found.tensors) == {name, "w"}
