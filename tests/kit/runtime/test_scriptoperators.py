"""A TorchScript file that does more than compute with tensors is rejected before any of its code runs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import torch
from architectures import Mlp
from scriptedmodels import save

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import scriptoperators
from bf16kit.runtime.torchscript import TorchScriptRuntime

X = TensorSpec("x", "float32", ("batch", 16))
Y = TensorSpec("y", "float32", ("batch", 4))
SAVE = 'torch.save([1], "executed")'
FILE = 'torch.from_file("executed", True, 4)'
MLP, LINEAR = "class Mlp(", "class Linear("
BODY, HEAD = "    up = self.up\n", "  training : bool\n"
LINEAR_BODY = "    weight = self.weight\n"
STATE = f"  def __setstate__(self, s: Tensor) -> NoneType:\n    {SAVE}\n    return None\n"
IN_BRANCH = f"{BODY}    if bool(torch.gt(torch.sum(x), 0)):\n      {SAVE}\n    else:\n      pass\n"
UNUSED = f"  def unused(self, x: Tensor) -> Tensor:\n    {SAVE}\n    return x\n"

# By name: the class whose code is changed, the text there, its replacement, the word that is found, and the operator
# that torch compiles.
FORBIDDEN = {
    "writing": (MLP, BODY, f"{BODY}    {SAVE}\n", "save", "aten::save"),
    "reading": (MLP, BODY, f"{BODY}    x = torch.add(x, {FILE})\n", "from_file", "aten::from_file"),
    "by another name": (MLP, BODY, f'{BODY}    t = torch\n    t.save([1], "executed")\n', "save", "aten::save"),
    "in a submodule": (LINEAR, LINEAR_BODY, f"{LINEAR_BODY}    {SAVE}\n", "save", "aten::save"),
    "in a branch": (MLP, BODY, IN_BRANCH, "save", "aten::save"),
    "in a method that is not called": (MLP, HEAD, f"{HEAD}{UNUSED}", "save", "aten::save"),
    "as a default": (MLP, "x: Tensor) ->", f"x: Tensor, y: Tensor={FILE}) ->", "from_file", ""),
    "as a constant": (MLP, HEAD, f"{HEAD}  a : Final[Tensor] = {FILE}\n", "from_file", ""),
    "in __setstate__": (MLP, HEAD, f"{HEAD}{STATE}", "__setstate__", ""),
    "other machines": (MLP, BODY, f"{BODY}    y = ops.c10d.barrier()\n", "c10d", ""),
    "C++ objects": (MLP, BODY, f"{BODY}    y = __torch__.torch.classes.quantized.L()\n", "classes", ""),
}  # fmt: skip


@pytest.fixture
def mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save(tmp_path / "m.pt", Mlp(), torch.ones(2, 16))


def _changed(path: Path, kind: str, old: str, new: str) -> Path:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    place = next(name for name, data in records.items() if name.endswith(".py") and kind.encode() in data)
    assert old.encode() in records[place]
    records[place] = records[place].replace(old.encode(), new.encode(), 1)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("what", FORBIDDEN)
def test_code_that_would_do_more_than_compute_is_rejected_and_does_not_run(
    mlp: Path, tmp_path: Path, what: str
) -> None:
    kind, old, new, word, _ = FORBIDDEN[what]
    with pytest.raises(RuntimeFailure, match=rf"cannot load m\.pt: its code in '[^']*' has the word '{word}', which"):
        TorchScriptRuntime(_changed(mlp, kind, old, new), [X], [Y])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ['"u" "p"', '"\\x75p"'])
def test_an_attribute_whose_name_is_computed_is_rejected(mlp: Path, name: str) -> None:
    with pytest.raises(RuntimeFailure, match="looks up an attribute whose name it computes"):
        TorchScriptRuntime(_changed(mlp, MLP, "self.up\n", f"getattr(self, {name})\n"), [X], [Y])


@pytest.mark.parametrize("what", [what for what, (*_, operator) in FORBIDDEN.items() if operator])
def test_an_operator_that_the_words_miss_is_rejected_before_it_is_called(
    mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(scriptoperators, "_WORD", re.compile("no such word"))
    kind, old, new, _, operator = FORBIDDEN[what]
    with pytest.raises(RuntimeFailure, match=f"its code uses the operator {operator}, which no model needs"):
        TorchScriptRuntime(_changed(mlp, kind, old, new), [X], [Y])
    assert not (tmp_path / "executed").exists()


def test_a_pickle_that_makes_an_object_of_a_class_in_c_is_rejected(mlp: Path) -> None:
    """Torch finds such a class by its name, without code in the file, and gives it a state of the file's choice."""
    pickle = b"\x80\x02c__torch__\nM\n)\x81c__torch__.torch.classes.quantized\nLinearPackedParamsBase\n)\x81b."
    with zipfile.ZipFile(mlp) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(mlp, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, pickle if name.endswith("/data.pkl") else data)
    with pytest.raises(RuntimeFailure, match=r"cannot load m\.pt: its pickle has the word 'classes', which makes"):
        TorchScriptRuntime(mlp, [X], [Y])
