"""Small faults in Python source: which there are in a package, and how one is planted and put back."""

import ast
import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip
_RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Fault:
    """``text``: what was there, and what replaces it. ``place``: the number of the node in :func:`ast.walk`'s order."""

    file: str
    line: int
    text: str
    nth: int  # which of the equal faults of its file: lines and places move when code above them changes
    place: int


def faults(package: Path) -> list[Fault]:
    """Return all faults that can be planted in ``package``, a directory or a file."""
    found: list[Fault] = []
    for path in files(package):
        seen: dict[str, int] = {}
        for place, node, new in _replacements(ast.parse(path.read_text("utf-8"))):
            text = f"{_short(node)} -> {_short(new)}"
            found.append(Fault(str(path), getattr(node, "lineno", 0), text, seen.setdefault(text, 0), place))
            seen[text] += 1
    return found


def files(package: Path) -> list[Path]:
    """Return the Python files of ``package``, a directory or a file."""
    return sorted(package.rglob("*.py")) if package.is_dir() else [package]


@contextlib.contextmanager
def rewritten(package: Path) -> Iterator[None]:
    """Write all files as :func:`ast.unparse` does. Afterwards they are as they were.

    A fault is then the only difference that its tests see: what fails on the rewritten files is no test of a fault.
    """
    with contextlib.ExitStack() as stack:
        for path in files(package):
            stack.enter_context(_put_back(path))
            path.write_text(ast.unparse(ast.parse(path.read_text("utf-8"))), "utf-8")
        yield


@contextlib.contextmanager
def _put_back(path: Path) -> Iterator[None]:
    """Leave the file as it was: its text, and its time, by which Python knows whether bytecode is of this text."""
    source, stat = path.read_text("utf-8"), path.stat()
    try:
        yield
    finally:
        path.write_text(source, "utf-8")
        os.utime(path, (stat.st_atime, stat.st_mtime))


def lines(path: Path) -> dict[int, int]:
    """Return the line of each node of a file, by its place."""
    tree = ast.parse(path.read_text("utf-8"))
    return {place: getattr(node, "lineno", 0) for place, node in enumerate(ast.walk(tree))}


@contextlib.contextmanager
def planted(fault: Fault, turn: int) -> Iterator[None]:
    """Write the fault into its rewritten file; ``turn`` is another one each time. Afterwards the file is as it was."""
    path = Path(fault.file)
    tree = ast.parse(path.read_text("utf-8"))
    old, new = next((node, new) for place, node, new in _replacements(tree) if place == fault.place)

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            replaced: ast.AST = new if node is old else super().visit(node)
            return replaced

    with _put_back(path):
        later = path.stat().st_mtime + turn  # a time of its own for each version: no bytecode of another one is used
        path.write_text(ast.unparse(ast.fix_missing_locations(Replace().visit(tree))), "utf-8")
        os.utime(path, (later, later))
        yield


def _replacements(tree: ast.Module) -> Iterator[tuple[int, ast.AST, ast.AST]]:
    """Yield the number of a node, the node, and what replaces it."""
    left = _left_alone(tree)
    for place, node in enumerate(ast.walk(tree)):
        if id(node) not in left:
            new = _operator(node) or _statement(node)
            if new is not None:
                yield place, node, new


def _left_alone(tree: ast.Module) -> set[int]:
    """Annotations, decorators, assertions, errors' messages, imports for annotations: tests need not notice them."""
    parts: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts += node.decorator_list
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(node.returns)
        if isinstance(node, ast.AnnAssign | ast.arg):
            parts.append(node.annotation)
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            parts += ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            parts.append(node)
    return {id(inner) for part in parts if part is not None for inner in ast.walk(part)}


def _operator(node: ast.AST) -> ast.AST | None:
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            new.ops = [_SWAPPED[type(op)]()]  # type: ignore[list-item]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in _SWAPPED:
            new.op = _SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int() | float() as value):
            new.value = value + 1
        case ast.Call(func=ast.Name(id=name)) if name in _RENAMED:
            new.func = ast.Name(_RENAMED[name])
        case _:
            return None
    return new


def _statement(node: ast.AST) -> ast.AST | None:
    new = copy.deepcopy(node)
    match new:
        case ast.IfExp() | ast.If() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.Expr(value=ast.Call()) | ast.Raise():
            return ast.Pass()
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            new.value = ast.Constant(None)
        case ast.Break():
            return ast.Continue()
        case ast.Continue():
            return ast.Break()
        case _:
            return None
    return new


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node.test if isinstance(node, ast.If | ast.While) else node).split())[:60]
