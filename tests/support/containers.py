"""A container with little memory or few processors, as the files of its control group show it."""

from pathlib import Path

import pytest

from bf16kit.system import controlgroup


def in_container(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    limit: int | None = None,
    left: int = 0,
    cpus: float | None = None,
) -> None:
    """Have this process find itself in a group of ``limit`` bytes with ``left`` of them left, and of ``cpus``."""
    root, member = tmp_path / "cgroup", tmp_path / "membership"
    root.mkdir(exist_ok=True)
    member.write_text("0::/\n")
    if limit is not None:
        (root / "memory.max").write_text(f"{limit}\n")
        (root / "memory.current").write_text(f"{limit - left}\n")
    if cpus is not None:
        (root / "cpu.max").write_text(f"{round(cpus * 100_000)} 100000\n")
    monkeypatch.setattr(controlgroup, "ROOT", root)
    monkeypatch.setattr(controlgroup, "MEMBERSHIP", member)
