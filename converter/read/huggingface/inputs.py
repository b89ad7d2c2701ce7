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
from converter.read.huggingface.model_directory import Directory

BATCH, SEQ, DECODER_SEQ, SAMPLES, FRAMES = "batch", "seq", "decoder_seq", "samples", "frames"
IMAGES = "images"  # the batch of images if it differs from the batch of texts
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
    modalities = getattr(module, "input_modalities", None) or ()
    modalities = (modalities,) if isinstance(modalities, str) else modalities
    others = [name for modality in modalities for name in _MODALITIES.get(modality, ()) if name in parameters]
    names = dict.fromkeys((module.main_input_name, *others))  # the main input first
    shapes = {name: _shape(name, directory, notes) for name in names}
    shapes |= {name: shape for name, shape in _companions(module, directory, shapes).items() if name in parameters}
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if shapes.get(name, () if required else None) == ():
            raise UsageError(
                f"the shape of {name}, which {type(module).__name__} needs, is not in the files of {directory.path};"
                f" pass --input {name}:DTYPE:DIMS, and one --input for each other input"
            )
    floats = ("pixel_values", "input_features", "input_values")
    dtypes = {name: "float32" if name in floats else "int64" for name in shapes}
    return tuple(TensorSpec(name, dtypes[name], (BATCH, *shape)) for name, shape in shapes.items()), notes


def batches(inputs: tuple[TensorSpec, ...]) -> list[tuple[TensorSpec, ...]]:
    """Return the variants of ``inputs`` to try: texts and images in separate batches if it has both, then as given.

    A model that compares texts with images takes any number of each. A model that reads them together takes equally
    many. Only a run shows which one it is.
    """
    if not {"input_ids", "pixel_values"} <= {spec.name for spec in inputs}:
        return [inputs]
    return [tuple(replace(s, shape=(IMAGES, *s.shape[1:])) if s.name == "pixel_values" else s for s in inputs), inputs]


def _shape(name: str, directory: Directory, notes: list[str]) -> tuple[int | str, ...]:
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


def _companions(
    module: Any, directory: Directory, main: Mapping[str, tuple[int | str, ...]]
) -> dict[str, tuple[int | str, ...]]:
    """Return masks, segments and the decoder's inputs, if the model uses them, each with the shape of what it masks."""
    found: dict[str, tuple[int | str, ...]] = {}
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
