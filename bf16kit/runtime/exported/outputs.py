"""What the outputs of a torch.export program are called: the keys of what its module returned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bf16kit.runtime.exported.values import Ref

_LONGEST = 200  # characters of a name
_DEEPEST = 8


def output_names(module: Mapping[str, Any], results: Sequence[Any], inputs: Sequence[str]) -> tuple[str, ...]:
    """A name for each of ``results``, "" for one that is no tensor.

    A mapping's keys; ``output`` for one tensor, ``output_0`` … for several; the parts of a nested one after a dot. One
    that is called as one of the ``inputs`` is called ``…_out``. Where the JSON does not say, or says it of another
    number of outputs, they are numbered.
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
    """The tree of outputs, which is JSON in JSON; None where there is none."""
    try:
        calls = module["module_call_graph"]
        return json.loads(calls[0]["signature"]["out_spec"])[1]
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        return None


def _leaves(tree: Any, prefix: str, depth: int) -> Iterator[str]:
    """The leaves' names; none at all for what is no tree."""
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
    """The keys of a mapping, of which ``count`` are expected; None for a sequence."""
    try:
        found = json.loads(context) if isinstance(context, str) else context
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != count or not all(isinstance(key, str) for key in found):
        return None
    return found if all(0 < len(key) <= _LONGEST and key.isprintable() for key in found) else None
