"""Sounds made from formulas: chords, and vowels with pauses that resemble speech."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# The first three resonances of a, e, i, o, u, in Hz.
_VOWELS = ((730, 1090, 2440), (530, 1840, 2480), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240))


def speech(seconds: float, rate: int = 16_000, seed: int = 0) -> NDArray[np.float32]:
    """Return vowels of 0.15 to 0.3 s, some followed by a pause, with quiet noise: fp32 in −1 to 1, [seconds · rate]."""
    random = np.random.default_rng(seed)
    pieces: list[Array] = []
    while sum(map(len, pieces)) < seconds * rate:
        pieces.append(_vowel(_VOWELS[random.integers(len(_VOWELS))], random.uniform(0.15, 0.3), rate, random))
        if random.random() < 0.4:
            pieces.append(np.zeros(int(random.uniform(0.1, 0.5) * rate)))
    sound = np.concatenate(pieces)[: int(seconds * rate)]
    return (sound + 0.002 * random.standard_normal(len(sound))).astype(np.float32)


def _vowel(formants: tuple[int, ...], seconds: float, rate: int, random: np.random.Generator) -> Array:
    """Return the harmonics of a voice, each as loud as the resonances near it allow, with a fade at both ends."""
    time = np.arange(int(seconds * rate)) / rate
    pitch = random.uniform(90, 220) * (1 + 0.05 * np.sin(2 * np.pi * 5 * time))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    sound = np.zeros_like(time)
    for harmonic in range(1, 25):
        frequency = harmonic * pitch.mean()
        loudness = sum(np.exp(-(((frequency - formant) / 120) ** 2)) for formant in formants) + 0.02
        sound += loudness / harmonic**0.5 * np.sin(harmonic * phase)
    return np.asarray(0.3 * sound / np.abs(sound).max() * np.hanning(len(time)) ** 0.3)


def chords(seconds: float, rate: int = 22_050, seed: int = 0) -> NDArray[np.float32]:
    """Return chords of two to four decaying notes, every half second: fp32 in −1 to 1, [seconds · rate]."""
    random = np.random.default_rng(seed)
    sound = np.zeros(int(seconds * rate))
    for start in range(0, len(sound), rate // 2):
        time = np.arange(len(sound) - start) / rate
        for key in random.choice(np.arange(40, 76), random.integers(2, 5), replace=False):
            frequency = 440 * 2 ** ((key - 69) / 12)
            note = sum(np.sin(2 * np.pi * k * frequency * time) / k**1.5 for k in range(1, 6))
            sound[start:] += 0.15 * note * np.exp(-3 * time)
    return np.clip(sound, -1, 1).astype(np.float32)


def filterbank(sound: NDArray[np.float32], rate: int = 16_000, bands: int = 80) -> NDArray[np.float32]:
    """Return log mel energies of frames of 25 ms every 10 ms, of 16-bit values as in Kaldi: [frames, bands]."""
    width, hop, size = rate // 40, rate // 100, 512
    count = 1 + (len(sound) - width) // hop
    frames = np.lib.stride_tricks.sliding_window_view(sound * 32768.0, width)[::hop][:count]
    frames = frames - frames.mean(1, keepdims=True)
    frames = np.concatenate([frames[:, :1] * 0.03, frames[:, 1:] - 0.97 * frames[:, :-1]], 1) * np.hamming(width)
    power = np.abs(np.fft.rfft(frames, size)) ** 2
    return np.asarray(np.log(np.maximum(power @ _mel(rate, size, bands), 1.2e-7)), np.float32)


def _mel(rate: int, size: int, bands: int) -> Array:
    """Return triangles evenly spaced on the mel scale from 20 Hz up: [size / 2 + 1, bands]."""
    mel = 1127 * np.log1p(np.arange(size // 2 + 1) * rate / size / 700)
    edges = np.linspace(1127 * np.log1p(20 / 700), 1127 * np.log1p(rate / 2 / 700), bands + 2)
    rising = (mel[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - mel[:, None]) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)))
