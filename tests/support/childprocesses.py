"""The processes that another one has started."""

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """Return the children of the process ``pid``: those that any of its threads has started."""
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has just ended
            found |= {*map(int, thread.joinpath("children").read_text().split())}
    return found
