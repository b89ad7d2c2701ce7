"""Tests use the product through its public names, and replace none of its functions. Ruff's SLF001 checks ``x._y``.

They may make public constants smaller, which are bounds and paths, and have the system or a library fail.
"""

import ast
import re
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_PRODUCT = re.compile(r"(bf16kit|oip_conformance)\.|a local ")
# These replace functions of the product all the same.
_EXCEPTIONS = {
    "contract/test_model_control.py": "holds a load or a run of a server that has only its configuration as a door",
    "converter/fuse/test_check.py": "makes wrong fusions: the check refuses them",
    "converter/fuse/test_fuse.py": "makes wrong fusions: a conversion goes on without them",
    "converter/islands/test_search.py": "chooses the few samples that mislead a search",
    "converter/test_gates.py": "breaks the converter anywhere: a gate notices",
    "converter/verify/test_secondjudge.py": "breaks the judge: the second judge notices",
    "e2e/test_profile_choice.py": "runs as on another processor, whose instructions this one lacks",
    "service/grpc/test_incidents.py": "puts a bug into a call: the others go on",
    "service/machines/test_admission_machine.py": "delivers calls in gRPC's place, in any order",
    "service/test_bugs.py": "puts a bug into periodic work: the server goes on",
    "support/scriptedengines.py": "scripts the sessions of a repository of hundreds of states",
    "support/secondjudge.py": "judges every conversion of these tests a second time",
    "support/servedmachine.py": "leaves out the garbage collection after each of hundreds of loads",
}


_IMPORTS = re.compile(r"^[ \t]*(?:from|import) [^(\n]*(?:\([^)]*\))?", re.MULTILINE)


def _reached(source: str) -> list[str]:
    """Return what a test imports of the product's private names, and what it replaces with ``setattr``."""
    if "setattr" not in source and not any(re.search(r"\b_(?!_)", found) for found in _IMPORTS.findall(source)):
        return []  # most tests: they need not be parsed
    tree, imported, replaced = ast.parse(source), dict[str, str](), []
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: f"{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            what = ".".join(map(ast.unparse, node.args[:-1])).replace("'", "")
            root, dot, rest = what.partition(".")
            known = what if isinstance(node.args[0], ast.Constant) else imported.get(root, f"a local {root}")
            replaced.append(known if known == what else known + dot + rest)
    private = [name for name in imported.values() if re.search(r"\._(?!_)", name)]
    return [
        each for each in [*private, *replaced] if _PRODUCT.match(each) and not re.search(r"\.[A-Z][A-Z\d_]*$", each)
    ]


def test_tests_go_through_the_products_doors() -> None:
    files = {
        str(path.relative_to(_TESTS)): path
        for path in _TESTS.rglob("*.py")
        if path.relative_to(_TESTS).parts[0] != "bench"
    }
    reaching = {name: found for name, path in files.items() if (found := _reached(path.read_text("utf-8")))}
    assert {name: found for name, found in reaching.items() if name not in _EXCEPTIONS} == {}
    assert reaching.keys() == _EXCEPTIONS.keys(), "exceptions that are not needed"


def test_the_rule_bites() -> None:
    source = (
        "import os, bf16kit as s\nfrom bf16kit.shadow import _MAX, MAX, process as p\nfrom bf16kit import __version__"
    )
    for what in ("s, 'load'", "s.config, 'load'", "p.Class, '_f'", "p, '_MAX'", "'bf16kit.a.b'", "made, 'run'"):
        assert len(_reached(f"{source}\npatch.setattr({what}, 0)")) == 2, what
    for what in ("os, 'fsync'", "p, 'MAX'", "'bf16kit.a.MAX'", "os.path, '_x'"):
        assert _reached(f"{source}\npatch.setattr({what}, 0)") == ["bf16kit.shadow._MAX"]
