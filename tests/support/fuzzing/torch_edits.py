"""Edits of torch's zip files: the archive's records, and the pickle that describes them."""

import functools
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from random import Random

from fuzzing import bytewise

Records = dict[str, bytes]
Edit = Callable[[Records, Random], None]

GLOBALS = (b"os\nsystem", b"builtins\neval", b"posix\nsystem", b"pathlib\nPath.touch", b"torch\nload", b"numpy\nfromfile", b"torch._utils\n_rebuild_parameter",
           b"torch._utils\n_rebuild_sparse_tensor", b"torch._utils\n_rebuild_qtensor", b"torch\nFloatTensor", b"torch.storage\nUntypedStorage",
           b"torch\nComplexFloatStorage", b"torch\nQInt8Storage", b"nope\nnope", b"collections\nOrderedDict", b"torch.nn.modules.linear\nLinear",
           b"torch._utils\n_rebuild_device_tensor_from_numpy", b"torch._utils\n_rebuild_meta_tensor_no_storage")  # fmt: skip
TEXTS = (b"cpu", b"cuda:0", b"meta", b"../../0", b"0", b"1", b"99", b"/etc/hostname", b"", b"storage", b"up.weight")


def _pickled(records: Records) -> str:
    return next((name for name in records if name.endswith("/data.pkl")), "")


def forbidden(records: Records, random: Random) -> None:
    """Replace the global that rebuilds tensors with another one, or put a call of another one first."""
    name = _pickled(records)
    body = records.get(name, b"")
    injected_global = random.choice(GLOBALS)
    if random.random() < 0.6:
        records[name] = body.replace(b"torch._utils\n_rebuild_tensor_v2", injected_global, 1).replace(
            b"torch\nFloatStorage", injected_global if random.random() < 0.3 else b"torch\nFloatStorage"
        )
    else:
        records[name] = body[:2] + b"c" + injected_global + b"\nX\x0e\x00\x00\x00touch executed\x85R0" + body[2:]


def numbers(records: Records, random: Random) -> None:
    """Replace a size, stride, offset or count in the pickle: storages become too short, shapes become wrong."""
    name = _pickled(records)
    body = bytearray(records.get(name, b""))
    places = [i for i in range(2, len(body) - 2) if body[i] in b"KM" and body[i - 1] not in b"cX"]
    if not places:
        return
    place = random.choice(places)
    wide = 1 if body[place] == ord("K") else 2
    value = random.choice((0, 1, 2, 63, 255, 2**16, 2**31 - 1, -1, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64))
    made = pickle.dumps(value, 2)[2:-1]
    records[name] = bytes(body[:place]) + made + bytes(body[place + 1 + wide :])


def texts(records: Records, random: Random) -> None:
    """Replace a string in the pickle: a device, a storage key or a name."""
    name = _pickled(records)
    body = records.get(name, b"")
    lengths = [(i, int.from_bytes(body[i + 1 : i + 5], "little")) for i in range(len(body) - 5) if body[i] == ord("X")]
    places = [place for place, length in lengths if 0 < length < 30]
    if places:
        place = random.choice(places)
        size = int.from_bytes(body[place + 1 : place + 5], "little")
        text = random.choice((*TEXTS, b"\xff\xfe", b"a\x00b", b"x" * 3000))
        records[name] = body[:place] + b"X" + struct.pack("<I", len(text)) + text + body[place + 5 + size :]


def storages(records: Records, random: Random) -> None:
    """Replace the dtype of storages, so that their bytes are read as another type."""
    name = _pickled(records)
    kinds = (
        b"Double", b"Half", b"BFloat16", b"Long", b"Int", b"Byte", b"Bool", b"ComplexDouble", b"QUInt8", b"Untyped",
    )  # fmt: skip
    records[name] = records.get(name, b"").replace(
        b"torch\nFloatStorage", b"torch\n" + random.choice(kinds) + b"Storage", random.choice((1, -1))
    )


def pickles(records: Records, random: Random) -> None:
    """Replace the pickle: with nested lists, an object that contains itself, or opcodes that need gigabytes."""
    depth = random.choice((100, 20_000, 300_000))
    records[_pickled(records)] = random.choice((
        b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02}q\x00X\x0a\x00\x00\x00state_dicth\x00s.",
        b"\x80\x02}.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",  # a long string
        b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b"x.",
        b"\x80\x02r" + struct.pack("<I", 2**31 - 1) + b".",  # a huge memo index
        b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
        b"\x80\x02N" + b"2\x86" * 40 + b".",  # doubling tuples
        b"\x80\x02]" + b"(" * 500_000 + b".",
    ))  # fmt: skip


def record(records: Records, random: Random) -> None:
    """Damage or remove a record, change its length, or add one of another format or whose name leads out."""
    name, what = random.choice((_pickled(records), *records)), random.randrange(4)
    if what == 0:
        records[name] = random.choice(bytewise.EDITS)(records[name], random)
    elif what == 1:
        records.pop(name)
    elif what == 2:
        records[name] = random.choice((records[name][:-1], b"", records[name] * 2, records[name][:8]))
    else:
        added = random.choice(("m/constants.pkl", "m/../../secret", "/etc/hostname", "m/data/99", "archive_format", "m/byteorder", "data.pkl",
                               "m/.data/serialization_id", "other/data.pkl", "m/data.pkl/x", "model.weights.h5", "é" * 100))  # fmt: skip
        records[added] = random.choice((b"", b"big", b"little", b"x" * 100, records[name]))


def values(records: Records, random: Random) -> None:
    """Replace a weight with NaN, infinity and the like."""
    names = [name for name, content in records.items() if "/data/" in name and len(content) >= 4]
    if names:
        name = random.choice(names)
        records[name] = bytewise.special(records[name], random)


EDITS: tuple[Edit, ...] = (
    forbidden, numbers, numbers, numbers, texts, storages, pickles, pickles, record, record, record, record, values,
)  # fmt: skip


def edit(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return the names of the edits and the archive, rewritten after one or two edits or with false zip tables."""
    if random.random() < 0.2:
        return _lie(content, random)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    names = []
    for _ in range(random.choice((1, 1, 2))):
        if not records:
            break
        chosen = random.choice(EDITS)
        names.append(chosen.__name__)
        chosen(records, random)
    deflated = random.random() < 0.1
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as archive:
        for name, record in records.items():
            archive.writestr(zipfile.ZipInfo(name), record, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    return "+".join(names) + ("+deflated" if deflated else ""), written.getvalue()


def _lie(content: bytes, random: Random) -> tuple[str, bytes]:
    """Write a false size, offset or count into the zip's own tables, or return a zip bomb (:func:`_bomb`)."""
    if random.random() < 0.05:
        return "bomb", _bomb(content)
    mark, fields = random.choice((
        (b"PK\x03\x04", (8, 14, 18, 22, 26, 28)),
        (b"PK\x01\x02", (10, 16, 20, 24, 28, 30, 42)),
        (b"PK\x05\x06", (8, 10, 12, 16, 20)),
        (b"PK\x06\x06", (24, 32, 40, 48)),
    ))  # fmt: skip
    places = [i for i in range(len(content) - 60) if content[i : i + 4] == mark] or [max(0, len(content) - 22)]
    place = random.choice(places) + random.choice(fields)
    value = random.choice((0, 1, 8, 0xFFFF, 0xFFFFFFFF, 2**31, random.randrange(len(content))))
    width = random.choice((2, 4, 8))
    return "zip tables", content[:place] + (value % (1 << 8 * width)).to_bytes(width, "little") + content[
        place + width :
    ]


@functools.cache
def _bomb(content: bytes) -> bytes:
    """Append 2,200 MiB of zeros to the first storage, deflated. They are never in memory all at once."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, record in records.items():
            if name.endswith(("/data/0", "/data.pkl")):
                with archive.open(name, "w", force_zip64=True) as out:
                    out.write(record)
                    for _ in range(220 if name.endswith("/0") else 4):
                        out.write(bytes(10 << 20))
            else:
                archive.writestr(name, record)
    return written.getvalue()
