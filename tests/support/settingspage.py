"""Writes the tables of docs/configuration.md from the code: ``python tests/support/settingspage.py PAGE``.

Each table stands between two marks, as :mod:`drifttable` has them.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bf16kit.service.cli import main as command
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.models.serving import Serving

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def kind(annotation: Any) -> str:
    """Return the type of a value as an operator writes it."""
    text = re.sub(r"Annotated\[(\w+), .*", r"\1", getattr(annotation, "__name__", "") or str(annotation))
    if "Literal" in text:
        return ", ".join(re.findall(r"'([^']+)'", str(annotation)))
    if "tuple" in str(annotation) and "dict" not in str(annotation):
        return "list"
    if "dict" in str(annotation):
        return "mapping"
    names = {
        "bool | str": "true, false or text",
        "int": "integer",
        "float": "number",
        "str": "text",
        "bool": "true, false",
    }
    for name, words in (*names.items(), ("Path", "path")):
        if name in str(annotation) or name == text:
            return words
    return "mapping"


def shown(value: Any) -> str:
    """Return a default as ``server.yaml`` has it."""
    if value is None or value in ((), {}):
        return "–"
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_defaults=True)
        return f"`{{{', '.join(f'{key}: {each}' for key, each in given.items())}}}`" if given else "below"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


def bounds(field: FieldInfo) -> str:
    """Return the bounds of a number; of a text, the form that error messages show."""
    found = {
        sign: getattr(each, name) for each in field.metadata for name, sign in BOUNDS.items() if hasattr(each, name)
    }
    return field.title or ", ".join(f"{sign} {int(value):,}" for sign, value in found.items()) or "–"


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key with its field; a section of ``serving.yaml`` is followed by its own keys."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        if name in ("shadow", "fallback"):
            assert isinstance(field.annotation, type)
            yield from rows(field.annotation, f"{name}.")


def server() -> str:
    """Return the table of ``server.yaml``."""
    flags = {option.name: option.opts[0] for option in command.params}
    lines = ["| key | flag | type | default | bounds | meaning |", "|---|---|---|---|---|---|"]
    for key, field in rows(ServerConfig):
        default = "required" if field.is_required() else shown(field.default)
        flag = f"`{flags[key]}`" if key in flags else "–"
        lines.append(
            f"| `{key}` | {flag} | {kind(field.annotation)} | {default} | {bounds(field)} | {field.description} |"
        )
    return "\n".join(lines) + "\n"


def model() -> str:
    """Return the table of ``serving.yaml``."""
    lines = ["| key | type | default | bounds | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{key}` | {kind(field.annotation)} | {shown(field.default)} | {bounds(field)} | {field.description} |"
        for key, field in rows(Serving)
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with both tables as the code has them."""
    for name, table in (("server", server()), ("model", model())):
        before, begin, rest = page.partition(f"<!-- {name}: written by make docs -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        page = before + begin + table + end + after
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text("utf-8")), "utf-8")
