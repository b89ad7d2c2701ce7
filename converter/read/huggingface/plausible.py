"""Plausible inputs for a model: token ids from its vocabulary, smooth images, waveforms, spectrograms, padded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from converter.read.huggingface.inputs import BATCH, FRAMES, IMAGES, SAMPLES
from converter.read.huggingface.model_directory import Directory
from converter.source import Array, Feeds, Sampler

_ROWS = 2
_SEQ_RANGE = (4, 64)  # tokens per sample
_FRAMES_RANGE = (32, 128)
_WINDOWS = (12, 48)  # a waveform's length, in steps of the model's convolutions
_KNOWN = ("input_ids", "attention_mask", "token_type_ids", "pixel_values", "input_values", "input_features")


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
            yield {
                spec.name: np.ascontiguousarray(feed.values(spec).astype(BY_NAME[spec.dtype].numpy)) for spec in inputs
            }

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
        if kind == "token_type_ids":
            return np.zeros(shape)
        if kind == "attention_mask":
            return self._valid(spec, shape)
        if kind == "input_ids":
            return self._tokens(spec, shape)
        if kind == "input_values":
            return self._wave(spec, shape)
        if kind == "pixel_values":
            return self._image(shape)
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
        if len(shape) > 2:
            return self.random.standard_normal(shape)
        pitch = self.random.uniform(0.01, 0.5, (shape[0], 3, 1))
        wave = np.sin(pitch * np.arange(shape[1])).sum(axis=1) + 0.3 * self.random.standard_normal(shape)
        wave = (wave - wave.mean(axis=1, keepdims=True)) / (wave.std(axis=1, keepdims=True) + 1e-7)
        return np.asarray(np.where(self._valid(spec, shape), wave, 0.0) if self.masked else wave)


def _range(dim: str, directory: Directory) -> tuple[int, int]:
    """Return the range of lengths to draw from, its end excluded."""
    if dim == FRAMES:
        return _FRAMES_RANGE
    if dim == SAMPLES:
        strides = directory.setting("conv_stride")
        step = math.prod(strides) if isinstance(strides, list) else 320
        return _WINDOWS[0] * step, _WINDOWS[1] * step
    # Fewer tokens have a position than the table has rows if positions start after the padding id.
    stated = [directory.number(n, 0) for n in ("max_position_embeddings", "n_positions", "max_target_positions")]
    rows = min((number for number in stated if number > 0), default=_SEQ_RANGE[1] * 2)
    longest = min(_SEQ_RANGE[1], max(1, rows - directory.number("pad_token_id", -1) - 1))
    return min(_SEQ_RANGE[0], longest), longest + 1
