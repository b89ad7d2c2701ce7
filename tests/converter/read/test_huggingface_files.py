"""The inputs that a model declares, from its class and its directory's files; and the files that an export copies."""

import json
from pathlib import Path
from typing import Any

import hfzoo
import numpy as np
import pytest
import torch
from converting import ONNX_ONLY, Cli
from safetensors.torch import load_file, save_file

from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.options import Options, parse_target
from bf16kit.converter.process.quiet import quiet
from bf16kit.converter.read.huggingface import load, model_directory
from bf16kit.converter.read.huggingface.inputs import declared, sampler
from bf16kit.converter.read.huggingface.model_directory import Directory, companions
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.numerics.tensors import TensorSpec


def directory(
    config: dict[str, Any], preprocessor: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None
) -> Directory:
    return Directory(Path("somewhere"), config, preprocessor or {}, tokenizer or {}, None, ())


def module(name: str) -> Any:
    import transformers

    architecture, config, fields, _ = hfzoo.MODELS[name]
    with quiet():
        return getattr(transformers, architecture)(getattr(transformers, config)(**fields))


@pytest.mark.long
@pytest.mark.parametrize(
    ("preprocessor", "config", "expected"),
    [
        ({"size": {"height": 40, "width": 56}}, {}, (40, 56)),
        ({"size": {"shortest_edge": 36}, "crop_size": {"height": 24, "width": 24}}, {}, (24, 24)),
        ({"size": 36, "crop_size": 24, "do_center_crop": False}, {}, (36, 36)),
        ({"size": {"longest_edge": 100}}, {"image_size": 32}, (32, 32)),
        ({}, {"image_size": [16, 32]}, (16, 32)),
        ({}, {"vision_config": {"image_size": 64}}, (64, 64)),
    ],
)
def test_the_size_of_images_is_read_from_the_preprocessor_or_the_config(
    preprocessor: dict[str, Any], config: dict[str, Any], expected: tuple[int, int]
) -> None:
    [spec], notes = declared(module("resnet"), directory(config, preprocessor))
    assert spec == TensorSpec("pixel_values", "float32", ("batch", 3, *expected))
    assert notes == []


def test_frames_of_a_video_are_an_axis_and_an_image_size_that_no_file_states_is_assumed_with_a_note() -> None:
    [spec], _ = declared(module("resnet"), directory({"num_frames": 4, "num_channels": 1}, {"size": 32}))
    assert spec.shape == ("batch", 4, 1, 32, 32)
    [spec], [note] = declared(module("resnet"), directory({}))
    assert spec.shape == ("batch", 3, 224, 224)
    assert "the directory does not name its image size" in note


def test_audio_has_a_mask_if_the_preprocessor_returns_one() -> None:
    wave, config = module("wav2vec2"), {"conv_stride": [5, 2]}
    specs, _ = declared(wave, directory(config, {"return_attention_mask": True}))
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("input_values", ("batch", "samples")),
        ("attention_mask", ("batch", "samples")),
    ]
    sample = sampler(directory(config), specs)
    assert sample is not None
    feed = next(iter(sample(0, 1)))
    assert np.all(feed["input_values"][feed["attention_mask"] == 0] == 0)
    assert [spec.name for spec in declared(wave, directory(config))[0]] == ["input_values"]


@pytest.mark.parametrize(
    ("name", "config", "files", "expected"),
    [  # a decoder of queries gets no mask: it would be one of objects, and objects have no padding
        ("detr", {}, {"preprocessor": {"size": 32}}, ["pixel_values"]),
        ("bert", {"type_vocab_size": 2}, {}, ["input_ids", "attention_mask", "token_type_ids"]),
        (
            "bert",
            {"type_vocab_size": 2},
            {"tokenizer": {"model_input_names": ["input_ids", "attention_mask"]}},
            ["input_ids", "attention_mask"],
        ),
    ],
)
def test_masks_and_segments_are_inputs_if_the_model_uses_them(
    name: str, config: dict[str, Any], files: dict[str, Any], expected: list[str]
) -> None:
    specs, _ = declared(module(name), directory(config, **files))
    assert [spec.name for spec in specs] == expected


def test_an_input_without_a_description_is_rejected_with_the_remedy() -> None:
    class Forecast(torch.nn.Module):
        main_input_name, config = "past_values", type("Config", (), {"is_encoder_decoder": False})()

        def forward(self, past_values: torch.Tensor, past_mask: torch.Tensor) -> torch.Tensor:
            return past_values * past_mask

    with pytest.raises(UsageError, match="--input past_values:DTYPE:DIMS"):
        declared(Forecast(), directory({}))


def test_samples_look_like_the_output_of_a_tokenizer() -> None:
    """Rows have ids of the vocabulary, an end token and padding, and fit the positions; the seed decides them."""
    config = {"vocab_size": 20, "pad_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 12}
    specs = tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask"))
    sample = sampler(directory(config), specs)
    assert sample is not None
    feeds = list(sample(0, 30))
    for feed, again in zip(feeds, sample(0, 30), strict=True):
        ids, mask = feed["input_ids"], feed["attention_mask"]
        np.testing.assert_array_equal(ids, again["input_ids"])
        assert ids.shape[1] <= 10
        assert ids.max() < 20
        np.testing.assert_array_equal(ids == 1, mask == 0)
        assert np.all(ids[np.arange(2), mask.sum(axis=1) - 1] == 2)
    assert any(np.any(feed["attention_mask"] == 0) for feed in feeds)


@pytest.mark.parametrize(
    ("name", "config", "left_out"),
    [
        ("bert", {}, set()),  # its config sets use_cache, but it has no cache
        ("bert", {"output_hidden_states": True}, {"hidden_states"}),
        ("llama", {"output_hidden_states": True}, {"past_key_values", "hidden_states"}),
    ],
)
def test_outputs_that_the_config_requests_are_named_and_not_computed(
    tmp_path: Path, name: str, config: dict[str, Any], left_out: set[str]
) -> None:
    with quiet():
        found = Directory.open(hfzoo.save(name, tmp_path / name, **config))
    options = Options(source=found.path, target=parse_target(tmp_path / "m" / "1"))
    model, _, notes = load(options, found, found.tensors()[0])
    assert {
        {"cache": "past_key_values"}.get(name, name) for name in model.left_out
    } == left_out  # renamed by transformers 5.24
    assert all(name in note for name in model.left_out for note in notes)
    assert len(notes) == bool(left_out)
    with torch.no_grad():
        assert len(model.module(*model.example)) == len(model.outputs)


def test_an_input_must_be_a_parameter_of_forward(cli: Cli, tmp_path: Path, target: Path) -> None:
    with quiet():
        root = hfzoo.save("vit", tmp_path / "model")
    said = "--input image: ViTForImageClassification takes pixel_values"
    cli("checkpoint", root, "--out", target, "--input", "image:float32:batch,3,32,32").refused(2, said)


@pytest.mark.long
@pytest.mark.slow
def test_tensors_that_only_the_checkpoint_has_are_named_and_restored(cli: Cli, tmp_path: Path, target: Path) -> None:
    """The checkpoint has a head that the named class does not have, and it lacks the pooler."""
    with quiet():
        root = hfzoo.save("bert", tmp_path / "model")
    tensors = load_file(root / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    save_file(tensors | {"head.weight": torch.ones(3, 32)}, root / "model.safetensors", {"format": "pt"})
    done = cli("checkpoint", root, "--out", target, *ONNX_ONLY, "--profile", "cpu").published()
    said = " ".join(done.out.split())
    assert "BertModel does not use 1 of the checkpoint's tensors (head.weight)" in said
    assert "the checkpoint has no pooler, so BertModel gives no pooler_output" in said
    artifact = Artifact.open(target)
    assert [entry.name for entry in artifact.manifest.outputs] == ["last_hidden_state"]
    assert "head.weight" in dict(artifact.checkpoint_tensors())


def _directory(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "bert"} | config))
    return path


def test_only_known_files_are_copied_and_the_others_that_may_be_needed_are_named(tmp_path: Path) -> None:
    _directory(tmp_path)
    known = {"target_vocab.json", "spm_char.model", "source.spm", "bpe.codes", "chat_template.jinja", "LICENSE"}
    known |= {"processor_config.json", "tokenizer.json", "vocab.txt"}
    weights = {"model.safetensors", "pytorch_model.bin.index.json", "flax_model.msgpack"}
    for name in (*known, *weights, "README.md", "optimizer.pt", "training_args.bin", ".gitattributes"):
        (tmp_path / name).write_text(name)
    (tmp_path / "onnx").mkdir()
    found, notes = companions(tmp_path)
    assert found.keys() == {*known, "config.json"}
    assert notes == []
    assert found["vocab.txt"] == b"vocab.txt"
    for name in ("modeling_custom.py", "words.dict"):
        (tmp_path / name).write_text("")
    found, [note] = companions(tmp_path)
    assert found.keys() == {*known, "config.json"}
    assert note.startswith("not copied beside the exported weights: 'modeling_custom.py', 'words.dict'; copy those")


def test_the_config_states_bfloat16_wherever_it_stated_a_dtype(tmp_path: Path) -> None:
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32", "depth": 2}, "vision_config": {"depth": 1}}
    assert json.loads(companions(_directory(tmp_path, **config))[0]["config.json"]) == {
        "model_type": "bert",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "depth": 2},
        "vision_config": {"depth": 1},
    }


def test_a_link_out_of_the_directory_is_rejected(tmp_path: Path) -> None:
    """Otherwise the author of a repository could publish any file that the converter's user can read."""
    (tmp_path / "secret").write_text("the owner's")
    _directory(tmp_path / "m")
    (tmp_path / "m" / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match=r"vocab\.txt: a link out of the directory"):
        companions(tmp_path / "m")


def test_links_of_the_hubs_cache_to_its_own_blobs_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "models--acme--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").write_text("a\nb\n")
    snapshot = _directory(tmp_path / "models--acme--m" / "snapshots" / "abc")
    (snapshot / "vocab.txt").symlink_to("../../blobs/0123")
    assert companions(snapshot)[0]["vocab.txt"] == b"a\nb\n"


def test_a_file_beyond_the_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_directory, "LARGEST", 1 << 20)
    _directory(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(SourceError, match=r"tokenizer\.json: larger than 1 MiB"):
        companions(tmp_path)
