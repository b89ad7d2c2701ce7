"""Reads YAML that a user wrote, and says where it is wrong: the line, and a caret under the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import brief, os_error_text, printable, quoted

_SHOWN = 100  # columns of a line with an error


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the YAML mapping in ``file``, as :func:`parse_mapping` does. Also raises if it cannot be read."""
    try:
        return parse_mapping(file.read_bytes(), file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {os_error_text(error)}") from None


def parse_mapping(data: bytes, file: Path) -> dict[str, Any]:
    """Return the YAML mapping in ``data``, the bytes of ``file``; {} for an empty file.

    Raises :class:`ConfigError` with a plain reason, also for an alias, a key that is given twice, and an integer of
    more than 64 bits.
    """
    try:
        content = yaml.load(data.decode("utf-8"), _Loader)  # noqa: S506 -- a SafeLoader
    except _Refused as error:
        raise ConfigError(f"{file}: line {error.line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        # ValueError: no UTF-8; 2001-99-99 is no date. OverflowError: a float in base 60, which YAML has.
        raise ConfigError(f"{file}: {not_yaml(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def not_yaml(error: Exception) -> str:
    """Return why a text is not YAML; if the place is known, two more lines have its text and a caret under it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"is not YAML: {brief(error)}"
    mark, begun = error.problem_mark, error.context_mark
    since = f", {error.context} that begins in line {begun.line + 1}" if begun and begun.line < mark.line else ""
    snippet = printable((mark.get_snippet(2, _SHOWN) or "").replace("\t", " "))
    return "\n".join(
        [f"line {mark.line + 1}, column {mark.column + 1}: is not YAML: {brief(error.problem)}{since}", snippet]
    )


class _Refused(yaml.MarkedYAMLError):
    """YAML that is valid, and that no configuration needs."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(None, None, problem, mark)
        self.line = mark.line + 1


class _Loader(yaml.SafeLoader):
    """Reads plain values. A few lines with aliases may stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: yaml.AliasEvent = self.peek_event()  # type: ignore[no-untyped-call]  # yaml's own
            raise _Refused(f"*{brief(event.anchor)} is an alias: write the value itself there", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise _Refused(f"{quoted(key.value)} is given twice: leave one out", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if abs(value := int(super().construct_yaml_int(node))) >= 1 << 63:
            raise _Refused(f"{quoted(node.value)} has more than 64 bits: give a smaller number", node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
