"""``examples/quickstart.ipynb``: its cells run one after the other, and it is kept with the outputs of such a run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_CELLS = json.loads((Path(__file__).parents[2] / "examples/quickstart.ipynb").read_text("utf-8"))["cells"]
_CODE = [cell for cell in _CELLS if cell["cell_type"] == "code"]
# Runs the cells as a notebook does: in one namespace, showing the value of a cell that ends with an expression.
_RUN = """
import ast, gc, json, sys
names = {}
for source in json.load(sys.stdin):
    *body, last = ast.parse(source).body
    value = isinstance(last, ast.Expr)
    exec(compile(ast.Module([*body, *([] if value else [last])], []), "cell", "exec"), names)
    shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if value else None
    for show in ("__repr__", "_repr_html_"):
        print(show, len(getattr(shown, show)()) if value and hasattr(shown, show) else 0)
gc.freeze()
"""


@pytest.mark.long
def test_the_cells_of_the_notebook_run_and_show_what_it_says(tmp_path: Path) -> None:
    sources = json.dumps(["".join(cell["source"]) for cell in _CODE])
    done = subprocess.run([sys.executable, "-c", _RUN], cwd=tmp_path, input=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"(?:fp32|bf16): ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 2
    assert 90 < accuracies[0] <= accuracies[1] + 0.5
    served, labels = (re.findall(rf"^{name}: (.+)$", done.stdout, re.MULTILINE) for name in ("served", "labels"))
    assert served == labels != []
    pages = [int(length) for length in re.findall(r"^_repr_html_ (\d+)$", done.stdout, re.MULTILINE)]
    assert [page > 1000 for page in pages if page] == [True] * 3  # the result, the report and the comparison


def test_the_notebook_is_kept_with_its_outputs_and_without_this_machines_paths() -> None:
    assert [cell["execution_count"] for cell in _CODE] == list(range(1, len(_CODE) + 1))
    assert all(cell["outputs"] for cell in _CODE)
    text = json.dumps(_CELLS)
    assert not re.search(r"/(tmp|home|root|work|Users)/", text)
    assert "Error" not in text
    assert len(text) < 50_000  # the page of the report, a third of a megabyte, is left out
