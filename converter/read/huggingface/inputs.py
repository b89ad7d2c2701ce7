"""A model's inputs, found from its own class: the parameters of ``forward``, and its config and preprocessor files.

There is no list of model families. An input is recognised by its parameter's name, and its size comes from the setting
that the model itself uses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bf16kit.converter.read.huggingface.model_directory import Directory
from bf16kit.converter.source import Array, Feeds, Sampler
from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import BY_NAME, TensorSpec

BATCH, SEQ, DECODER_SEQ, SAMPLES, FRAMES = "batch", "seq", "decoder_seq", "samples", "frames"
IMAGES = "images"  # the batch of images if it differs from the batch of texts
_IMAGE = 224  # pixels, if the directory does not say: the size that most vision models were trained on
# The parameters that may carry each modality that a class declares.
_MODALITIES = {"text": ("input_ids",), "image": ("pixel_values",), "audio": ("input_features", "input_values")}
_ROWS = 2
_SEQ_RANGE = (4, 64)  # tokens per sample
_FLOATS = ("pixel_values", "input_values", "input_features")
_KNOWN = ("input_ids", "attention_mask", "token_type_ids", *_FLOATS)
_Dims = tuple[int | str, ...]


def declared(module: Any, directory: Directory) -> tuple[tuple[TensorSpec, ...], list[str]]:
    """Return the inputs that ``module`` needs, and notes on what was assumed.

    Raises :class:`UsageError` naming an input that the directory does not describe.
    """
    parameters = inspect.signature(module.forward).parameters
    notes: list[str] = []
    modalities = getattr(module, "input_modalities", None) or ()
    modalities = (modalities,) if isinstance(modalities, str) else modalities
    others = [name for modality in modalities for name in _MODALITIES.get(modality, ()) if name in parameters]
    shapes = {name: _shape(name, directory, notes) for name in dict.fromkeys((module.main_input_name, *others))}
    shapes |= {name: shape for name, shape in _companions(module, directory, shapes).items() if name in parameters}
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if shapes.get(name, () if required else None) == ():
            raise UsageError(
                f"the shape of {name}, which {type(module).__name__} needs, is not in the files of {directory.path};"
                f" pass --input {name}:DTYPE:DIMS, and one --input for each other input"
            )
    dtypes = {name: "float32" if name in _FLOATS else "int64" for name in shapes}
    return tuple(TensorSpec(name, dtypes[name], (BATCH, *shape)) for name, shape in shapes.items()), notes


def batches(inputs: tuple[TensorSpec, ...]) -> list[tuple[TensorSpec, ...]]:
    """Return the variants of ``inputs`` to try: texts and images in separate batches if it has both, then as given.

    A model that compares texts with images takes any number of each. A model that reads them together takes equally
    many. Only a run shows which one it is.
    """
    if not {"input_ids", "pixel_values"} <= {spec.name for spec in inputs}:
        return [inputs]
    return [tuple(replace(s, shape=(IMAGES, *s.shape[1:])) if s.name == "pixel_values" else s for s in inputs), inputs]


def _shape(name: str, directory: Directory, notes: list[str]) -> _Dims:
    """Return the dimensions of the input ``name`` after the batch; () if the directory does not describe it."""
    if name == "input_ids":
        return (SEQ,)
    if name == "pixel_values":
        frames, channels = directory.setting("num_frames"), directory.number("num_channels", 3)
        return (*((frames,) if isinstance(frames, int) else ()), channels, *_image_size(directory, notes))
    mels, positions, length = (directory.number(n, 0) for n in ("num_mel_bins", "max_source_positions", "max_length"))
    if name == "input_values":
        return (length, mels) if length and mels else (SAMPLES,)  # a model of whole spectrograms, or of waveforms
    if name == "input_features" and mels and positions:
        return mels, 2 * positions  # two frames to a position: a convolution halves them
    features = directory.number("feature_projection_input_dim", directory.number("input_feat_per_channel", 0))
    return (FRAMES, features) if name == "input_features" and features else ()


def _companions(module: Any, directory: Directory, main: Mapping[str, _Dims]) -> dict[str, _Dims]:
    """Return masks, segments and the decoder's inputs, if the model uses them, each with the shape of what it masks."""
    found: dict[str, _Dims] = {}
    audio = next((main[name] for name in ("input_values", "input_features") if main.get(name)), None)
    if "input_ids" in main:
        found["attention_mask"] = (SEQ,)
        stated = directory.tokenizer.get("model_input_names")
        excluded = isinstance(stated, list) and "token_type_ids" not in stated
        if directory.number("type_vocab_size", 0) > 1 and not excluded:
            found["token_type_ids"] = (SEQ,)
    elif audio is not None and directory.preprocessor.get("return_attention_mask") is True:
        found["attention_mask"] = (audio[0] if audio[0] in (SAMPLES, FRAMES) else audio[-1],)
    # Without token ids the decoder reads queries of its own, one for each object, which have no padding.
    decodes = "decoder_input_ids" in inspect.signature(module.forward).parameters
    if getattr(module.config, "is_encoder_decoder", False) and decodes:
        found |= dict.fromkeys(("decoder_input_ids", "decoder_attention_mask"), (DECODER_SEQ,))
    return found


def _image_size(directory: Directory, notes: list[str]) -> tuple[int, int]:
    """Return height and width: the preprocessor's output size, else the config's."""
    stated = directory.preprocessor
    cropped = stated.get("do_center_crop", True) and stated.get("crop_size")
    for size in (cropped, stated.get("size"), directory.setting("image_size")):
        if isinstance(size, Mapping):
            edge = size.get("shortest_edge")
            size = (size.get("height", edge), size.get("width", edge))
        height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        if type(height) is int and type(width) is int and min(height, width) > 0:
            return height, width
    notes.append(
        f"the directory does not name its image size, so {_IMAGE} by {_IMAGE} pixels are used; for another size,"
        f" pass --input pixel_values:float32:{BATCH},CHANNELS,HEIGHT,WIDTH"
    )
    return _IMAGE, _IMAGE


def sampler(directory: Directory, inputs: Sequence[TensorSpec]) -> Sampler | None:
    """Return a sampler of feeds for ``inputs``, or None if one of them is of an unknown kind.

    Dimensions of the same name have the same size within one feed, and rows the same length.
    """
    if not all(spec.name.removeprefix("decoder_") in _KNOWN for spec in inputs):
        return None

    def sample(seed: int, count: int) -> Iterator[Feeds]:
        random = np.random.default_rng(seed)
        for _ in range(count):
            feed = _Feed(directory, inputs, random)
            yield {spec.name: np.ascontiguousarray(feed.values(spec), BY_NAME[spec.dtype].numpy) for spec in inputs}

    return sample


class _Feed:
    """One feed: the sizes of its dimensions, drawn once, and the length of each row."""

    def __init__(self, directory: Directory, inputs: Sequence[TensorSpec], random: np.random.Generator) -> None:
        self.directory, self.random = directory, random
        self.masked = any(spec.name == "attention_mask" for spec in inputs)
        self.sizes: dict[str, int] = {}
        self.lengths: dict[int | str, Array] = {}

    def values(self, spec: TensorSpec) -> Array:
        shape = tuple(self._size(dim, axis) for axis, dim in enumerate(spec.shape))
        kind = spec.name.removeprefix("decoder_")
        if kind in ("attention_mask", "input_ids"):
            return self._valid(spec, shape) if kind == "attention_mask" else self._tokens(spec, shape)
        if kind == "input_values" and len(shape) == 2:
            return self._wave(spec, shape)
        if kind in ("pixel_values", "token_type_ids"):
            return self._image(shape) if kind == "pixel_values" else np.zeros(shape)
        return np.clip(self.random.standard_normal(shape) * 0.5, -1.0, 1.5)  # a spectrogram

    def _size(self, dim: int | str, axis: int) -> int:
        if isinstance(dim, int):
            return dim
        if dim not in self.sizes:
            rows = _ROWS + sum(d in self.sizes for d in (BATCH, IMAGES))  # texts and images differ in number
            self.sizes[dim] = rows if axis == 0 else int(self.random.integers(*_range(dim, self.directory)))
        return self.sizes[dim]

    def _valid(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return a mask, bool [rows, steps], that is true where a row is not padding. The first row is full."""
        rows, steps, dim = shape[0], shape[1], spec.shape[1]
        if dim not in self.lengths:
            self.lengths[dim] = self.random.integers(max(1, steps // 2), steps + 1, rows)
            self.lengths[dim][0] = steps
        return np.asarray(np.arange(steps) < self.lengths[dim][:, None])

    def _tokens(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return ids from the vocabulary, ended as a tokenizer ends them, padded at the right."""
        size, number = self.directory.number("vocab_size", 2), self.directory.number
        pad, end = number("pad_token_id", 0), number("eos_token_id", -1)
        mask = self._valid(spec, shape)
        ids = self.random.integers(0, size, shape)
        ids[ids == pad] = (pad + 1) % size
        if spec.name.startswith("decoder_"):
            ids[:, 0] = min(size - 1, number("decoder_start_token_id", 0))
        elif 0 <= end < size:
            ids[np.arange(shape[0]), mask.sum(axis=1) - 1] = end
        return np.where(mask, ids, pad)

    def _image(self, shape: tuple[int, ...]) -> Array:
        """Return blobs of colour with a little noise, about as bright as a normalised photograph."""
        *outer, height, width = shape
        coarse = self.random.standard_normal((*outer, math.ceil(height / 8), math.ceil(width / 8)))
        smooth = np.repeat(np.repeat(coarse, 8, axis=-2), 8, axis=-1)[..., :height, :width]
        return np.asarray(smooth + 0.25 * self.random.standard_normal(shape))

    def _wave(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return a few tones with noise, variance one as from a feature extractor, silent where a row is padding."""
        pitch = self.random.uniform(0.01, 0.5, (shape[0], 3, 1))
        wave = np.sin(pitch * np.arange(shape[1])).sum(axis=1) + 0.3 * self.random.standard_normal(shape)
        wave = (wave - wave.mean(axis=1, keepdims=True)) / (wave.std(axis=1, keepdims=True) + 1e-7)
        return np.asarray(np.where(self._valid(spec, shape), wave, 0.0) if self.masked else wave)


def _range(dim: str, directory: Directory) -> tuple[int, int]:
    """Return the range of lengths to draw from, its end excluded."""
    if dim == FRAMES:
        return 32, 128
    if dim == SAMPLES:
        strides = directory.setting("conv_stride")
        step = math.prod(strides) if isinstance(strides, list) else 320
        return 12 * step, 48 * step  # in steps of the model's convolutions
    # Fewer tokens have a position than the table has rows if positions start after the padding id.
    stated = [directory.number(n, 0) for n in ("max_position_embeddings", "n_positions", "max_target_positions")]
    rows = min((number for number in stated if number > 0), default=_SEQ_RANGE[1] * 2)
    longest = min(_SEQ_RANGE[1], max(1, rows - directory.number("pad_token_id", -1) - 1))
    return min(_SEQ_RANGE[0], longest), longest + 1
