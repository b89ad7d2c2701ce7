"""Bad archives are rejected before any of their content is used, and tensors are read as torch reads them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exportedfiles as files
import ml_dtypes
import numpy as np
import pytest
import torch
from architectures import Mlp, Tied, seeded

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported.archive import LARGEST_JSON, read_archive

Change = Callable[[bytes], bytes]


class Canary:
    """An object that creates the file ``executed`` in the working directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def read(archive: bytes, **options: bool) -> Any:
    return read_archive(memoryview(bytearray(archive)), **options)


def test_tensors_are_those_that_were_saved(mlp_archive: bytes) -> None:
    archive = read(mlp_archive, check_crc=True)
    for name, tensor in seeded(Mlp()).state_dict().items():
        assert np.array_equal(archive.tensor(name), tensor.numpy())
        assert archive.tensors[name].is_parameter


class Odd(torch.nn.Module):
    """A module with tensors of unusual kinds: strided, partial, bf16, scalar, empty, not persistent."""

    transposed: torch.Tensor
    part: torch.Tensor
    narrow: torch.Tensor
    scalar: torch.Tensor
    empty: torch.Tensor
    unsaved: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(24, dtype=torch.float32)
        self.register_buffer("transposed", base.reshape(4, 6).t())
        self.register_buffer("part", base[5:9])
        self.register_buffer("narrow", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(3.0))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("unsaved", torch.tensor([True, False]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.transposed.sum() + self.part.sum() + self.narrow.float().sum() + self.scalar + self.unsaved.sum()
        return x + used + self.empty.sum()


def test_strides_offsets_and_dtypes_are_kept() -> None:
    archive = read(files.exported(Odd(), torch.ones(2)))
    expected = dict(Odd().named_buffers())
    assert set(archive.tensors) == set(expected)
    for name, tensor in expected.items():
        found = archive.tensor(name)
        wanted = tensor.float().numpy()
        assert found.shape == tuple(tensor.shape)
        assert np.array_equal(found.astype(np.float32), wanted), name
    assert archive.tensor("narrow").dtype == np.dtype(ml_dtypes.bfloat16)
    assert archive.tensors["part"].offset == 5


def test_tied_weights_share_memory() -> None:
    archive = read(files.exported(seeded(Tied()), torch.zeros(2, 3, dtype=torch.int64)))
    assert np.shares_memory(archive.tensor("table.weight"), archive.tensor("out.weight"))


def weights(edit: Callable[[dict[str, Any]], object]) -> Change:
    """Return a change of the entry of ``up.weight`` in the weights' table."""
    return lambda archive: files.changed(archive, files.WEIGHTS, lambda table: edit(table["config"]["up.weight"]))


def constant(**entry: Any) -> Change:
    meta = {"path_name": "tensor_0", "is_param": False, "use_pickle": False, "tensor_meta": None}
    return lambda archive: files.changed(
        archive, files.CONSTANTS, lambda table: table["config"].update(extra=meta | entry)
    )


def meta(**fields: Any) -> Change:
    return weights(lambda entry: entry["tensor_meta"].update(fields))


def deflated(archive: bytes) -> bytes:
    return files.packed(files.records(archive), zipfile.ZIP_DEFLATED)


def twice(archive: bytes) -> bytes:
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr(next(name for name in file.namelist() if name.endswith(files.MODEL)), b"{}")
    return buffer.getvalue()


def two_roots(archive: bytes) -> bytes:
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr("other/x", b"")
    return buffer.getvalue()


def moved_header(archive: bytes) -> bytes:
    """Let the table at the end say that the last record begins at the second byte."""
    return in_table(archive, 42, 1)


def in_table(archive: bytes, field: int, *numbers: int) -> bytes:
    """Write ``numbers`` at byte ``field`` of the last record's entry in the table at the archive's end."""
    archive = files.packed(files.records(archive))
    place = archive.rindex(b"PK\x01\x02") + field
    return archive[:place] + struct.pack(f"<{len(numbers)}I", *numbers) + archive[place + 4 * len(numbers) :]


def also_a_constant(archive: bytes) -> bytes:
    """List the first weight among the constants, too."""
    found = files.records(archive)
    table = json.loads(found[files.WEIGHTS])
    entry = table["config"]["up.weight"] | {"path_name": "tensor_0"}
    constants = json.dumps({"config": {"up.weight": entry}}).encode()
    changed = {files.CONSTANTS: constants, "data/constants/tensor_0": found["data/weights/weight_0"]}
    return files.with_records(archive, **changed)


def renamed(archive: bytes) -> bytes:
    """Give the first record another name in its own header than in the table at the end."""
    return archive.replace(b"weight_0", b"weight_x", 1)


def added(name: str, content: bytes = b"") -> Change:
    return lambda archive: files.with_records(archive, **{name: content})


REFUSED: dict[str, tuple[Change, str]] = {
    "no zip": (lambda archive: b"PK\x03\x04 nothing", "truncated or damaged zip archive"),
    "cut": (lambda archive: archive[: len(archive) // 2], "truncated or damaged zip archive"),
    "deflated": (deflated, "is compressed or encrypted"),
    "one record twice": (twice, "two records called 'models/model.json'"),
    "two folders": (two_roots, "has 2 folders at its top"),
    "a header elsewhere": (moved_header, "does not begin where the archive says"),
    "two sizes": (lambda archive: in_table(archive, 20, 7), "bytes, but 7 are stored"),
    "an end behind the end": (lambda archive: in_table(archive, 20, 2**30, 2**30), "ends beyond the end of the file"),
    "a name elsewhere": (renamed, "has another name in its own header"),
    "the format of old": (added("serialized_exported_program.json", b"{}"), "save it again with torch 2.8 or newer"),
    "native code": (added("data/aotinductor/model/x.so", b"\x7fELF"), "holds compiled code"),
    "two programs": (added("models/other.json", b"{}"), r"holds 2 programs \(model, other\)"),
    "pickled weights of old": (added("data/weights/model.pt", pickle.dumps(Canary())), "keeps its tensors as a pickle"),
    "pickled constants of old": (added("data/constants/model.pt", pickle.dumps(Canary())), "keeps its tensors as a"),
    "no program": (lambda archive: files.with_records(archive, **{files.MODEL: None}), "holds 0 programs"),
    "no weights": (lambda archive: files.with_records(archive, **{files.WEIGHTS: None}), "has no record"),
    "a program that is no JSON": (added(files.MODEL, b"{"), "not JSON"),
    "a program in programs": (added(files.MODEL, b"[" * 100_000), "not JSON"),
    "a table that is a list": (added(files.WEIGHTS, b"[]"), "expected an object"),
    "a pickled weight": (weights(lambda entry: entry.update(use_pickle=True)), "is a pickle, which can run any code"),
    "pickled, said otherwise": (weights(lambda entry: entry.update(use_pickle=1)), "is a pickle, which can run any"),
    "an object": (constant(path_name="opaque_obj_0", use_pickle=True), "is an object, not a tensor"),
    "an object of C++": (constant(path_name="custom_obj_0", use_pickle=False), "is an object, not a tensor"),
    "a name that leads away": (weights(lambda entry: entry.update(path_name="../../x")), "is not a tensor record"),
    "a record that is missing": (weights(lambda entry: entry.update(path_name="weight_99")), "is not a tensor record"),
    "an unknown dtype": (meta(dtype=10), "scalar type 10, which bf16kit does not support"),
    "a sparse tensor": (meta(layout=1), "is not a plain strided tensor"),
    "more than there is": (meta(sizes=[{"as_int": 65}, {"as_int": 16}]), "takes 4160 bytes from record 'weight_0'"),
    "a stride beyond": (meta(strides=[{"as_int": 17}, {"as_int": 1}]), "takes 4348 bytes from record"),
    "an offset beyond": (meta(storage_offset={"as_int": 1}), "takes 4100 bytes from record"),
    "a size below zero": (meta(sizes=[{"as_int": -64}, {"as_int": 16}]), "size, stride or offset of -64"),
    "a huge size": (meta(sizes=[{"as_int": 2**62}, {"as_int": 16}]), f"size, stride or offset of {2**62}"),
    "sizes that strides of nothing multiply": (
        meta(sizes=[{"as_int": 2**26}, {"as_int": 1}], strides=[{"as_int": 0}, {"as_int": 0}]),
        f"takes {2**28} bytes from record 'weight_0', which has 4096",
    ),
    "sizes beyond memory of nothing": (
        meta(sizes=[{"as_int": size} for size in (0, 2**46, 2**46)], strides=[{"as_int": 1}] * 3),
        "has sizes whose product is beyond",
    ),
    "too many dimensions": (meta(sizes=[{"as_int": 1}] * 65, strides=[{"as_int": 1}] * 65), "has 65 dimensions"),
    "a symbolic size": (meta(sizes=[{"as_expr": {"expr_str": "exit()"}}, {"as_int": 16}]), "expected a 64-bit integer"),
    "a size that is true": (meta(sizes=[{"as_int": True}, {"as_int": 16}]), "expected a 64-bit integer, got True"),
    "fewer strides": (meta(strides=[{"as_int": 1}]), "has 2 sizes and 1 strides"),
    "a name with quotes": (
        lambda archive: files.changed(
            archive, files.WEIGHTS, lambda table: table["config"].update({'x"); exit("': table["config"]["up.bias"]})
        ),
        "has a name that no module gives its tensors",
    ),
    "one name twice": (also_a_constant, "has two tensors called 'up.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_archive_is_rejected_and_its_pickles_are_not_executed(
    mlp_archive: bytes, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, said = REFUSED[kind]
    with pytest.raises(RuntimeFailure, match=said):
        read(change(mlp_archive))
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_in_a_trusted_archive_is_marked_and_not_executed(
    mlp_archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader does not unpickle: only code that loads the module for a user who trusts it may do so."""
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(Canary(), buffer)
    change, _ = REFUSED["a pickled weight"]
    archive = files.with_records(change(mlp_archive), **{"data/weights/weight_0": buffer.getvalue()})
    assert read(archive, trust_pickle=True).tensors["up.weight"].pickled
    assert list(tmp_path.iterdir()) == []


def test_objects_are_rejected_even_in_trusted_archives(mlp_archive: bytes) -> None:
    change, said = REFUSED["an object"]
    with pytest.raises(RuntimeFailure, match=said):
        read(change(mlp_archive), trust_pickle=True)


def test_changed_bytes_are_detected_if_checksums_are_checked(mlp_archive: bytes) -> None:
    weight = np.ascontiguousarray(seeded(Mlp()).state_dict()["up.weight"].numpy()).tobytes()
    place = mlp_archive.index(weight)
    flipped = bytearray(mlp_archive)
    flipped[place] ^= 1
    assert read(bytes(flipped)).tensors
    with pytest.raises(RuntimeFailure, match=r"the bytes of tensor 'up\.weight' are not those that were written"):
        read(bytes(flipped), check_crc=True)


def test_a_program_longer_than_the_limit_is_not_parsed(mlp_archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bf16kit.runtime.exported.archive.LARGEST_JSON", 1000)
    with pytest.raises(RuntimeFailure, match=r"'models/model\.json' has \d+ bytes, over the limit of 1000"):
        read(mlp_archive)
    assert LARGEST_JSON == 64 << 20


def test_sample_inputs_are_not_read(mlp_archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export.load unpickles them without restrictions if its restricted reader rejects them."""
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save((Canary(),), buffer)
    assert read(added("data/sample_inputs/model.pt", buffer.getvalue())(mlp_archive)).tensors
    assert list(tmp_path.iterdir()) == []


class Turned(torch.nn.Module):
    """A module with one megabyte of weights that are not contiguous."""

    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.ones(512, 512).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.turned.sum()


def _with_names(names: int, rows: Callable[[int], int]) -> bytes:
    """Return an archive in which ``names`` more tensors use one record, tensor ``n`` with ``rows(n)`` of 512 rows."""

    def edit(config: Any) -> None:
        for number in range(names):
            more = json.loads(json.dumps(config["config"]["turned"]))
            more["tensor_meta"]["sizes"][1] = {"as_int": rows(number)}
            config["config"][f"more.{number}"] = more

    return files.changed(files.exported(Turned(), torch.ones(2)), files.WEIGHTS, edit)


def test_many_names_for_the_same_elements_share_one_array() -> None:
    archive = read(_with_names(1000, lambda _: 512))
    assert len({id(archive.tensor(f"more.{number}")) for number in range(1000)}) == 1
    assert archive.tensor("more.7") is archive.tensor("turned")


def test_an_archive_whose_views_would_take_many_times_its_size_is_rejected() -> None:
    """Each view is copied: 1,000 names for one non-contiguous record would take its memory 1,000 times."""
    assert read(_with_names(3, lambda number: 511 - number)).tensor("more.1").shape == (512, 510)
    with pytest.raises(RuntimeFailure, match=r"takes 6\d{6} bytes of tensors from a file of 1\d{6}, more than 4 times"):
        read(_with_names(5, lambda number: 511 - number))


def test_unaligned_records_give_the_same_tensors_as_aligned_ones() -> None:
    """zipfile, which packs the tests' archives, does not align records; then only the elements of a view are copied."""
    expected = dict(Odd().named_buffers())
    plain = files.exported(Odd(), torch.ones(2))
    shifted = files.packed({"padding/x": b"1", **files.records(plain)})
    for archive in (read(shifted), read(plain)):
        for name, tensor in expected.items():
            assert np.array_equal(archive.tensor(name).astype(np.float32), tensor.float().numpy()), name
