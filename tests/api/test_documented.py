"""The examples in the docstrings of the Python interface, and on its page, run as they are shown."""

import doctest
from pathlib import Path

import pytest

import bf16kit
from bf16kit.api import conversion, model, server

_PAGE = Path(__file__).parents[2] / "docs/python.md"


@pytest.mark.long
def test_the_examples_of_the_docstrings_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner, names = doctest.DocTestRunner(), {"bf16kit": bf16kit}
    shown = []
    for module in (bf16kit, conversion, model, server):
        for example in doctest.DocTestFinder().find(module, globs=names):
            example.globs = names  # what one example makes, the next one uses
            runner.run(example, clear_globs=False)
            shown += [example.name] * bool(example.examples)
    assert runner.summarize(verbose=False).failed == 0
    assert [name.rpartition(".")[2] for name in shown] == ["bf16kit", "convert", "compare", "load", "serve"]


@pytest.mark.long
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(_PAGE), module_relative=False, encoding="utf-8")
    assert (failed, tried > 10) == (0, True)
