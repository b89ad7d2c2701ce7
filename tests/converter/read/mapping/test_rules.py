"""Rules: the first full match counts, every leaf and tensor needs a place, and errors name what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bf16kit.messages.errors import SourceError, UsageError
from converter.read.mapping import rules
from converter.read.mapping.slots import Slot, Slots

W = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
SLOTS = Slots({"w": Slot("w", (8, 3), "plain", ""), "b": Slot("b", (4,), "plain", "")}, {})
LEAVES = {"p.w": W, "p.b": W[0, 0], "step": np.array(3)}
GOOD = [
    {"match": r"p\.w", "to": "w", "steps": [{"transpose": [0, 2, 1]}, {"reshape": [8, -1]}]},
    {"match": r"p\.(.)", "to": r"\1"},
    {"match": "step", "drop": True},
]


def _read(tmp_path: Path, given: Any) -> rules.Rules:
    path = tmp_path / "rules.yaml"
    path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    return rules.read(path)


def test_leaves_are_transformed_step_by_step(tmp_path: Path) -> None:
    found = rules.apply(_read(tmp_path, {"rules": GOOD}), LEAVES, SLOTS)
    np.testing.assert_array_equal(found.tensors["w"], W.transpose(0, 2, 1).reshape(8, 3))
    assert found.tensors["b"] is not None
    assert found.orders == {}  # reshaped or unchanged


def test_the_order_of_axes_is_known_only_for_transposed_leaves(tmp_path: Path) -> None:
    slots = Slots({"w": Slot("w", (4, 2, 3), "plain", "")}, {})
    steps = [{"transpose": [1, 2, 0]}, {"transpose": [1, 2, 0]}]
    found = rules.apply(_read(tmp_path, {"rules": [{"match": "w", "to": "w", "steps": steps}]}), {"w": W}, slots)
    assert found.orders == {"w": (2, 0, 1)}
    assert found.tensors["w"].shape == (4, 2, 3)


def test_a_tensor_may_keep_its_initial_value_or_be_filled_through_a_tied_one(tmp_path: Path) -> None:
    more = {"t": Slot("t", (8, 3), "plain", ""), "n": Slot("n", (), "plain", "", floating=False)}
    slots = Slots({**SLOTS.by_name, **more}, {"t": "w"})
    found = rules.apply(_read(tmp_path, {"rules": GOOD, "keep": ["n"]}), LEAVES, slots)
    assert found.kept == {"n"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({0: {"match": r"p\.w", "to": "w"}}, "shape: p.w becomes [2, 3, 4], and w is [8, 3] in the model"),
        ({0: {"match": r"p\.w", "to": "w", "steps": [{"reshape": [5, -1]}]}}, "shape: p.w: cannot reshape [2, 3, 4]"),
        ({0: {"match": r"p\.w", "to": "w", "steps": [{"reshape": [-1, -1]}]}}, "at most one size may be left open"),
        ({0: {"match": r"p\.w", "to": "w", "steps": [{"transpose": [0, 0, 1]}]}}, "cannot transpose [2, 3, 4]"),
        ({0: {"match": r"p\.w", "to": "x"}}, "unexpected: p.w is sent to x, which the model lacks"),
        ({1: {"match": r"p\.b", "to": "w", "steps": []}}, "twice: p.b is sent to w, which another leaf fills"),
        ({2: {"match": "steps?x", "drop": True}}, "no rule: step []"),
        ({1: {"match": r"p\.b", "drop": True}}, "missing: b [4]"),
    ],
)
def test_leaves_and_tensors_that_do_not_fit_are_named(tmp_path: Path, changed: dict[int, Any], said: str) -> None:
    given = [changed.get(index, rule) for index, rule in enumerate(GOOD)]
    with pytest.raises(SourceError) as refused:
        rules.apply(_read(tmp_path, {"rules": given}), LEAVES, SLOTS)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1, 2", "is not YAML"),
        ("rules: 3", "expected a mapping with a list called rules"),
        ({"rules": [], "rule": 1}, "unknown key 'rule'"),
        ({"rules": [3]}, "rule 1: expected a mapping with match and to"),
        ({"rules": [{"match": "(", "to": "w"}]}, "rule 1: '(' is not a regular expression"),
        ({"rules": [{"match": 3, "to": "w"}]}, "'3' is not a regular expression"),
        ({"rules": [{"match": "w"}]}, "expected either to: NAME or drop: true"),
        ({"rules": [{"match": "w", "to": "w", "drop": True}]}, "expected either to: NAME or drop: true"),
        ({"rules": [{"match": "w", "to": "w", "turn": []}]}, "unknown key 'turn'; known: drop, match, steps, to"),
        ({"rules": [{"match": "w", "to": "w", "steps": {"transpose": [1]}}]}, "steps is {'transpose': [1]}"),
        ({"rules": [{"match": "w", "to": "w", "steps": [{"flip": [1]}]}]}, "is neither {reshape: […]}"),
        ({"rules": [{"match": "w", "to": "w", "steps": [{"transpose": [True]}]}]}, "expected a list of integers"),
        ({"rules": [], "keep": "w"}, "keep is 'w', expected a list"),
    ],
)
def test_an_invalid_file_of_rules_is_rejected(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        _read(tmp_path, given)
    assert said in str(refused.value)
    assert "rules.yaml" in str(refused.value)


def test_a_group_that_the_pattern_lacks_is_rejected(tmp_path: Path) -> None:
    found = _read(tmp_path, {"rules": [{"match": "p.*", "to": r"\2"}]})
    with pytest.raises(UsageError, match=r"does not fit match 'p\.\*': invalid group reference"):
        rules.apply(found, LEAVES, SLOTS)


@pytest.mark.parametrize("name", ["a'b", "a\nb", "a: {b}", "ünï", "*a", "a\\1", "# a", "\x1b[31m"])
def test_any_name_can_be_written_and_read_again(tmp_path: Path, name: str) -> None:
    text = "\n".join(rules.lines([(name, name, (), "why")], [name]))
    found = _read(tmp_path, text)
    assert found.rules[0].match.fullmatch(name)
    assert found.keep[0].fullmatch(name)
    slots = Slots({name: Slot(name, (4,), "plain", "")}, {})
    assert list(rules.apply(found, {name: W[0, 0]}, slots).tensors) == [name]
