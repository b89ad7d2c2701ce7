"""Plausible inputs for a model: token ids from its vocabulary, smooth images, waveforms, spectrograms, padded rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from converter.read.huggingface.directory import Directory
from converter.read.huggingface.inputs import BATCHES, FRAMES, SAMPLES
from converter.source import Array, Feeds, Sampler

_ROWS = 2
_SEQ_RANGE = (4, 64)  # tokens per sample
_FRAMES_RANGE = (32, 128)
_WINDOWS = (12, 48)  # a waveform's length, in steps of the model's convolutions


def sampler(directory: Directory, inputs: Sequence[TensorSpec]) -> Sampler:
    """Return a sampler of feeds for ``inputs``; dimensions of the same name have the same size within one feed."""

    def sample(seed: int, count: int) -> Iterator[Feeds]:
        random = np.random.default_rng(seed)
        for _ in range(count):
            yield _FeedGenerator(directory, inputs, random).make()

    return sample


def vocabulary(directory: Directory) -> int:
    """Return the number of token ids; 2 if the config does not say."""
    return _number(directory, "vocab_size", 2)


def can_generate(inputs: Sequence[TensorSpec]) -> bool:
    """Return whether this module can make values for all of ``inputs``."""
    return all(spec.name.removeprefix("decoder_") in _GENERATORS for spec in inputs)


class _FeedGenerator:
    """One feed: the sizes of its dimensions, drawn once, and the length of each row."""

    def __init__(self, directory: Directory, inputs: Sequence[TensorSpec], random: np.random.Generator) -> None:
        self.directory, self.inputs, self.random = directory, inputs, random
        self.sizes: dict[str, int] = {}
        self.lengths: dict[int | str, Array] = {}

    def make(self) -> Feeds:
        return {spec.name: self._make(spec) for spec in self.inputs}

    def _make(self, spec: TensorSpec) -> Array:
        shape = tuple(self._size(dim, axis) for axis, dim in enumerate(spec.shape))
        values = _GENERATORS[spec.name.removeprefix("decoder_")](self, spec, shape)
        return np.ascontiguousarray(values.astype(BY_NAME[spec.dtype].numpy))

    def _size(self, dim: int | str, axis: int) -> int:
        if isinstance(dim, int):
            return dim
        if dim not in self.sizes:
            rows = _ROWS + sum(d in self.sizes for d in BATCHES)  # texts and images differ in number
            self.sizes[dim] = rows if axis == 0 else int(self.random.integers(*_range(dim, self.directory)))
        return self.sizes[dim]

    def valid(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return a mask, bool [rows, steps], that is true where a row is not padding.

        The first row of each feed is full.
        """
        dim = spec.shape[1] if spec.name != "input_features" else spec.shape[-1]
        rows, steps = shape[0], shape[1]
        if dim not in self.lengths:
            self.lengths[dim] = self.random.integers(max(1, steps // 2), steps + 1, rows)
            self.lengths[dim][0] = steps
        mask: Array = np.arange(steps) < self.lengths[dim][:, None]
        return mask

    def tokens(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return ids from the vocabulary, ended as a tokenizer ends them, padded at the right."""
        size = vocabulary(self.directory)
        pad, end = _number(self.directory, "pad_token_id", 0), _number(self.directory, "eos_token_id", -1)
        mask = self.valid(spec, shape)
        ids = self.random.integers(0, size, shape)
        ids[ids == pad] = (pad + 1) % size
        if spec.name.startswith("decoder_"):
            ids[:, 0] = min(size - 1, _number(self.directory, "decoder_start_token_id", 0))
        elif 0 <= end < size:
            ids[np.arange(shape[0]), mask.sum(axis=1) - 1] = end
        return np.where(mask, ids, pad)

    def mask(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        return self.valid(spec, shape)

    def segments(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape)

    def image(self, _spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return blobs of colour with a little noise, about as bright as a normalised photograph."""
        *outer, height, width = shape
        coarse = self.random.standard_normal((*outer, math.ceil(height / 8), math.ceil(width / 8)))
        smooth = np.repeat(np.repeat(coarse, 8, axis=-2), 8, axis=-1)[..., :height, :width]
        return np.asarray(smooth + 0.25 * self.random.standard_normal(shape))

    def wave(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Return a few tones with noise, variance one as from a feature extractor, silent where a row is padding."""
        if len(shape) > 2:
            return self.random.standard_normal(shape)
        time = np.arange(shape[1])
        pitch = self.random.uniform(0.01, 0.5, (shape[0], 3, 1))
        wave = np.sin(pitch * time).sum(axis=1) + 0.3 * self.random.standard_normal(shape)
        wave = (wave - wave.mean(axis=1, keepdims=True)) / (wave.std(axis=1, keepdims=True) + 1e-7)
        masked = any(other.name == "attention_mask" for other in self.inputs)
        return np.asarray(np.where(self.valid(spec, shape), wave, 0.0) if masked else wave)

    def spectrum(self, _spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        return np.clip(self.random.standard_normal(shape) * 0.5, -1.0, 1.5)


_GENERATORS = {
    "input_ids": _FeedGenerator.tokens,
    "attention_mask": _FeedGenerator.mask,
    "token_type_ids": _FeedGenerator.segments,
    "pixel_values": _FeedGenerator.image,
    "input_values": _FeedGenerator.wave,
    "input_features": _FeedGenerator.spectrum,
}


def _range(dim: str, directory: Directory) -> tuple[int, int]:
    """Return the range of lengths to draw from, its end excluded."""
    if dim == FRAMES:
        return _FRAMES_RANGE
    if dim == SAMPLES:
        step = math.prod(_strides(directory))
        return _WINDOWS[0] * step, _WINDOWS[1] * step
    longest = min(_SEQ_RANGE[1], _positions(directory))
    return min(_SEQ_RANGE[0], longest), longest + 1


def _positions(directory: Directory) -> int:
    """Return how many tokens have a position; fewer than the table's rows if positions start after the padding id."""
    found = [_number(directory, name, 0) for name in ("max_position_embeddings", "n_positions", "max_target_positions")]
    rows = min((number for number in found if number > 0), default=_SEQ_RANGE[1] * 2)
    return max(1, rows - _number(directory, "pad_token_id", -1) - 1)


def _strides(directory: Directory) -> Sequence[int]:
    strides = directory.setting("conv_stride")
    return strides if isinstance(strides, list) and all(isinstance(s, int) and s > 0 for s in strides) else [320]


def _number(directory: Directory, name: str, otherwise: int) -> int:
    found = directory.setting(name)
    found = found[0] if isinstance(found, list) and found else found
    return found if type(found) is int else otherwise
