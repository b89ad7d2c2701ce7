"""Every command rejects an artifact that changed since it was published, and names the file.

``tests/kit/test_artifact.py`` and ``test_manifest.py`` have the other kinds of damage.
"""

import shutil
from pathlib import Path

from converting import Cli

from bf16kit.artifact.artifact import Artifact


def _commands(artifact: Path) -> list[tuple[str | Path, ...]]:
    return [
        ("verify", artifact),
        ("inspect", artifact),
        ("restore", artifact, "--out", artifact.parent / "fp32.safetensors"),
    ]


def test_a_flipped_bit_of_any_file_is_caught_and_the_file_named(cli: Cli, mlp: Artifact, tmp_path: Path) -> None:
    """The artifact has every kind of file. The manifest holds the digests of all other files, and its own."""
    damaged = Path(shutil.copytree(mlp.path, tmp_path / "mlp" / "1"))
    names = sorted(path.name for path in damaged.iterdir())
    assert len(names) == 12
    for name in names:
        whole = (damaged / name).read_bytes()
        said = [f"{damaged / name}: "] if name == "manifest.json" else [f"{damaged / name}: its sha256 is", "again"]
        for at in (0, len(whole) // 2, len(whole) - 1):
            (damaged / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            for command in _commands(damaged):
                cli(*command).refused(2, *said)
        (damaged / name).write_bytes(whole)
    assert not (damaged.parent / "fp32.safetensors").exists()
    cli("verify", damaged).published()


def test_directories_that_are_not_artifacts_are_rejected(cli: Cli, tmp_path: Path) -> None:
    for command in _commands(tmp_path):
        cli(*command).refused(2, "not an artifact, it has no manifest.json")
    for command in _commands(tmp_path / "absent"):
        cli(*command).refused(2, "absent: no such directory")
    (tmp_path / "file").write_text("x")
    cli("inspect", tmp_path / "file").refused(2, "file: not a directory, as an artifact is")


def test_an_artifact_is_rejected_as_a_source(cli: Cli, small: Artifact, target: Path) -> None:
    cli("checkpoint", small.path, "--out", target).refused(2, "is a bf16kit artifact already", "restore")
