"""A model's inputs, found from its own class: the parameters of ``forward``, and its config and preprocessor files.

There is no list of model families. An input is recognised by its parameter's name, and its size comes from the setting
that the model itself uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.read.huggingface.directory import Directory

BATCH, SEQ, DECODER_SEQ, SAMPLES, FRAMES = "batch", "seq", "decoder_seq", "samples", "frames"
IMAGES = "images"  # the batch of images if it differs from the batch of texts
BATCHES = (BATCH, IMAGES)
_IMAGE = 224  # pixels, if the directory does not say: the size that most vision models were trained on
# The parameters that may carry each modality that a class declares.
_MODALITIES = {"text": ("input_ids",), "image": ("pixel_values",), "audio": ("input_features", "input_values")}


def check_given(module: Any, given: tuple[TensorSpec, ...]) -> None:
    """Raise :class:`UsageError` for an ``--input`` that is no parameter of the model's ``forward``."""
    parameters = inspect.signature(module.forward).parameters
    for spec in given:
        if spec.name not in parameters:
            known = ", ".join(name for name in parameters if name != "kwargs")
            raise UsageError(f"--input {spec.name}: {type(module).__name__} takes {known}")


def declared(module: Any, directory: Directory) -> tuple[tuple[TensorSpec, ...], list[str]]:
    """Return the inputs that ``module`` needs, and notes on what was assumed.

    Raises :class:`UsageError` naming an input that the directory does not describe.
    """
    parameters = inspect.signature(module.forward).parameters
    notes: list[str] = []
    specs = [_input_spec(name, module, directory, notes) for name in _main_inputs(module, parameters)]
    names = [spec.name for spec in specs]
    specs += [_companion_spec(name, specs) for name in _companion_names(names, module, directory, parameters)]
    known = {spec.name for spec in specs}
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and name not in known:
            raise UsageError(_remedy(module, directory, name))
    return tuple(specs), notes


def batches(inputs: tuple[TensorSpec, ...]) -> list[tuple[TensorSpec, ...]]:
    """Return the variants of ``inputs`` to try: texts and images in separate batches if it has both, then as given.

    A model that compares texts with images takes any number of each. A model that reads them together takes equally
    many. Only a run shows which one it is.
    """
    if not {"input_ids", "pixel_values"} <= {spec.name for spec in inputs}:
        return [inputs]
    separate_batches = [replace(s, shape=(IMAGES, *s.shape[1:])) if s.name == "pixel_values" else s for s in inputs]
    return [tuple(separate_batches), inputs]


def _main_inputs(module: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Return the input of each modality that the class declares, its main input first."""
    main = module.main_input_name
    modalities = getattr(module, "input_modalities", None) or ()
    modalities = (modalities,) if isinstance(modalities, str) else tuple(modalities)
    found = [name for modality in modalities for name in _MODALITIES.get(modality, ()) if name in parameters]
    return [main, *(name for name in found if name != main)]


def _companion_names(names: list[str], module: Any, directory: Directory, parameters: Mapping[str, Any]) -> list[str]:
    """Return masks, segments and the decoder's inputs, if the model uses them."""
    found = []
    if "attention_mask" in parameters and ("input_ids" in names or _masks_audio(names, directory)):
        found.append("attention_mask")
    if "token_type_ids" in parameters and "input_ids" in names and _has_segments(directory):
        found.append("token_type_ids")
    # Without token ids the decoder reads queries of its own, one for each object.
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        found += [name for name in ("decoder_input_ids", "decoder_attention_mask") if name in parameters]
    return found


def _masks_audio(names: list[str], directory: Directory) -> bool:
    audio = {"input_values", "input_features"} & set(names)
    return bool(audio) and directory.preprocessor.get("return_attention_mask") is True


def _has_segments(directory: Directory) -> bool:
    stated = directory.tokenizer.get("model_input_names")
    if isinstance(stated, list) and "token_type_ids" not in stated:
        return False
    return int(directory.setting("type_vocab_size") or 0) > 1


def _companion_spec(name: str, specs: list[TensorSpec]) -> TensorSpec:
    if name.startswith("decoder_"):
        return TensorSpec(name, "int64", (BATCH, DECODER_SEQ))
    main_input = next(spec for spec in specs if spec.name in ("input_ids", "input_values", "input_features"))
    steps = (
        main_input.shape[1]
        if main_input.shape[1:] == (main_input.shape[1],) or main_input.shape[1] == FRAMES
        else main_input.shape[-1]
    )
    return TensorSpec(name, "int64", (BATCH, steps))


def _input_spec(name: str, module: Any, directory: Directory, notes: list[str]) -> TensorSpec:
    """Return the input called ``name`` with its dtype and shape."""
    if name == "input_ids":
        return TensorSpec(name, "int64", (BATCH, SEQ))
    if name == "pixel_values":
        height, width = _image_size(directory, notes)
        channels, frames = directory.setting("num_channels"), directory.setting("num_frames")
        video = (frames,) if isinstance(frames, int) else ()
        channels = channels if isinstance(channels, int) else 3
        return TensorSpec(name, "float32", (BATCH, *video, channels, height, width))
    if name == "input_features":
        return TensorSpec(name, "float32", (BATCH, *_features(module, directory)))
    if name == "input_values":
        return TensorSpec(name, "float32", (BATCH, *_values(directory)))
    raise UsageError(_remedy(module, directory, name))


def _image_size(directory: Directory, notes: list[str]) -> tuple[int, int]:
    """Return height and width: the preprocessor's output size, else the config's."""
    stated = directory.preprocessor
    cropped = stated.get("do_center_crop", True) and stated.get("crop_size")
    for size in (cropped, stated.get("size"), directory.setting("image_size")):
        found = _pixels(size)
        if found is not None:
            return found
    notes.append(
        f"the directory does not name its image size, so {_IMAGE} by {_IMAGE} pixels are used; for another size,"
        f" pass --input pixel_values:float32:{BATCH},CHANNELS,HEIGHT,WIDTH"
    )
    return _IMAGE, _IMAGE


def _pixels(size: Any) -> tuple[int, int] | None:
    """Parse ``size`` as transformers writes it: a number, a pair, or one of two kinds of mapping."""
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    elif not isinstance(size, list | tuple):
        size = (size, size)
    if len(size) == 2 and all(type(edge) is int and edge > 0 for edge in size):
        return int(size[0]), int(size[1])
    return None


def _features(module: Any, directory: Directory) -> tuple[int | str, int | str]:
    """Return the shape of spectrograms: mel bands by a fixed number of frames, or frames by features."""
    mels, positions = directory.setting("num_mel_bins"), directory.setting("max_source_positions")
    if isinstance(mels, int) and isinstance(positions, int):
        return mels, 2 * positions  # two frames to a position: a convolution halves them
    features = directory.setting("feature_projection_input_dim") or directory.setting("input_feat_per_channel")
    if isinstance(features, int):
        return FRAMES, features
    raise UsageError(_remedy(module, directory, "input_features"))


def _values(directory: Directory) -> tuple[int | str, ...]:
    """Return the shape of a waveform; for models of whole spectrograms, frames by mel bands."""
    frames, mels = directory.setting("max_length"), directory.setting("num_mel_bins")
    if isinstance(frames, int) and isinstance(mels, int):
        return frames, mels
    return (SAMPLES,)


def _remedy(module: Any, directory: Directory, name: str) -> str:
    return (
        f"the shape of {name}, which {type(module).__name__} needs, is not in the files of {directory.path}; pass"
        f" --input {name}:DTYPE:DIMS, and one --input for each other input"
    )
