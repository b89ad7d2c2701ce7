"""``python tests/models/table.py`` updates docs/models.md from the figures of the last ``make test-models``."""

import re

from conversions import MEASURED, ROOT

PAGE = ROOT / "docs" / "models.md"
_MARKS = re.compile(r"(<!-- models: .* -->\n).*(<!-- end of models -->\n)", re.DOTALL)
_HEAD = """\
| model | kind | package | licence | MB | bf16 | with residual | drift cpu | drift cuda | slice | islands | seconds |
|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""

if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    begin, end = _MARKS.findall(page)[0]
    PAGE.write_text(_MARKS.sub(lambda _: begin + _HEAD + MEASURED.read_text("utf-8") + end, page), "utf-8")
