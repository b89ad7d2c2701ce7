"""How much memory the file mappings of this process take, and how much of that is private."""

from pathlib import Path


def mapped_kb(name: str) -> dict[str, int]:
    """Return the resident and the anonymous kB of this process' mappings of the file ``name``."""
    total = {"Rss": 0, "Anonymous": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split()[0]:  # 7f00-7f01 r--p …, the first line of a mapping
            inside = line.endswith(f"/{name}")
        elif inside and key in total:
            total[key] += int(value.split()[0])
    return total


def deleted_kb() -> int:
    """Return the resident kB of this process' mappings of scratch files, which are already deleted."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split()[0]:
            inside = line.endswith("(deleted)") and ".bf16kit-weights-" in line
        elif inside and key == "Rss":
            total += int(value.split()[0])
    return total
