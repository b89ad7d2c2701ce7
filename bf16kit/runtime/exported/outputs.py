"""Names of a torch.export program's outputs: the keys of its module's return value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bf16kit.messages import boundedjson
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported.values import Ref

_LONGEST = 200  # characters of a name
_DEEPEST = 8


def output_names(module: Mapping[str, Any], results: Sequence[Any], inputs: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each of ``results``, "" for one that is no tensor.

    A mapping's keys are the names. Otherwise a single tensor is ``output`` and several are ``output_0`` …; nested parts
    are joined by dots. An output with the name of one of the ``inputs`` gets the suffix ``_out``. When the JSON gives
    no names, or another number of them, the outputs are numbered.
    """
    tensors = [isinstance(result, Ref) for result in results]
    names = list(_leaves(_tree(module), "", 0))
    if len(names) != len(results) or len(set(names)) != len(names):
        names = [f"output_{place}" for place in range(len(results))]
    if sum(tensors) == 1:
        names = ["output" if name.startswith("output_") else name for name in names]
    named = [f"{name}_out" if name in inputs else name for name in names]
    return tuple(name if is_tensor else "" for name, is_tensor in zip(named, tensors, strict=True))


def _tree(module: Mapping[str, Any]) -> Any:
    """Return the tree of outputs, which is JSON within JSON; None if there is none."""
    try:
        calls = module["module_call_graph"]
        return _parsed(calls[0]["signature"]["out_spec"])[1]
    except (KeyError, IndexError, TypeError, ValueError, RuntimeFailure):
        return None


def _parsed(text: str) -> Any:
    return boundedjson.parse(text.encode(), RuntimeFailure, "outputs")


def _leaves(tree: Any, prefix: str, depth: int) -> Iterator[str]:
    """Yield the leaves' names; nothing if ``tree`` is not a tree."""
    if not isinstance(tree, Mapping) or depth > _DEEPEST:
        return
    children = tree.get("children_spec")
    if tree.get("type") is None or not isinstance(children, list):
        yield prefix or "output"
        return
    keys = _keys(tree.get("context"), len(children))
    for place, child in enumerate(children):
        if keys is not None:
            yield from _leaves(child, f"{prefix}.{keys[place]}" if prefix else keys[place], depth + 1)
        else:
            yield from _leaves(child, f"{prefix}.{place}" if prefix else f"output_{place}", depth + 1)


def _keys(context: Any, count: int) -> list[str] | None:
    """Return the ``count`` keys of a mapping; None for a sequence, or if the keys cannot be names."""
    try:
        found = _parsed(context) if isinstance(context, str) else context
    except (ValueError, RuntimeFailure):
        return None
    if not isinstance(found, list) or len(found) != count or not all(isinstance(key, str) for key in found):
        return None
    return found if all(0 < len(key) <= _LONGEST and key.isprintable() for key in found) else None
