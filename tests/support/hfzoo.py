"""Tiny transformers models with random weights, one directory each, saved as transformers itself saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_BERT = _TEXT | {"max_position_embeddings": 40, "pad_token_id": 0}
_LLAMA = _TEXT | {"max_position_embeddings": 64, "num_key_value_heads": 1, "pad_token_id": 0}
_T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 40,
}
_WHISPER = _BART | {
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}

# name: (class, config class, config, preprocessor_config.json or None)
MODELS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "bert": ("BertModel", "BertConfig", _BERT, None),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _BERT | {"pad_token_id": 1}, None),
    "distilbert": (
        "DistilBertForQuestionAnswering",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 40},
        None,
    ),
    "electra": ("ElectraForTokenClassification", "ElectraConfig", _BERT | {"embedding_size": 16}, None),
    "albert": ("AlbertModel", "AlbertConfig", _BERT | {"embedding_size": 16}, None),
    "mpnet": ("MPNetModel", "MPNetConfig", _BERT | {"pad_token_id": 1}, None),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        _BERT
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        None,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
        None,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, None),
    "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 8}, None),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, None),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5, None),
    "t5-encoder": ("T5EncoderModel", "T5Config", _T5, None),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART, None),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _WHISPER,
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "nb_max_frames": 100},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": _BERT
            | {"projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1, "max_position_embeddings": 40},
            "vision_config": _VIT | {"projection_dim": 16},
            "projection_dim": 16,
        },
        None,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT, {"size": {"height": 32, "width": 32}}),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        _RESNET,
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
        {"size": {"shortest_edge": 32}},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
        },
        {"size": 32},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        None,
    ),
    "detr": (
        "DetrForObjectDetection",
        "DetrConfig",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": _RESNET | {"model_type": "resnet", "out_features": ["stage2"]},
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 10,
        },
        {"size": {"height": 32, "width": 32}},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _TEXT
        | {
            "vocab_size": 32,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
        },
        {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16000, "return_attention_mask": False},
    ),
}


def save(name: str, directory: Path, **changed: Any) -> Path:
    """Save the model ``name`` with seeded weights in ``directory``, and return ``directory``.

    ``changed`` replaces or adds fields of its config.
    """
    import torch
    import transformers

    architecture, config, fields, preprocessor = MODELS[name]
    torch.manual_seed(0)
    module = getattr(transformers, architecture)(getattr(transformers, config)(**fields | changed)).eval()
    module.save_pretrained(directory)
    if preprocessor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return directory
