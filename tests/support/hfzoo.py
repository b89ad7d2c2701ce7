"""Tiny transformers models with random weights, one directory each, saved as transformers itself saves them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Config = dict[str, Any]

_LAYERS: Config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = _LAYERS | {"vocab_size": 64}
_BERT = _TEXT | {"max_position_embeddings": 40, "pad_token_id": 0}
_LLAMA = _TEXT | {"max_position_embeddings": 64, "num_key_value_heads": 1, "pad_token_id": 0}
_T5: Config = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
_T5 |= {"decoder_start_token_id": 0}
_DECODER: Config = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
}
_BART = _DECODER | {"vocab_size": 64, "max_position_embeddings": 40}
_WHISPER = _BART | {"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 40, "pad_token_id": 0}
_WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None}
_VIT = _LAYERS | {"image_size": 32, "patch_size": 8}
_RESNET: Config = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
_DISTILBERT: Config = {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
_DISTILBERT |= {"max_position_embeddings": 40}
_RELATIVE: Config = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
_RELATIVE |= {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}
_CLIP_TEXT = _BERT | {"projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1}
_SEGFORMER: Config = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
_SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
_SEGFORMER |= {"decoder_hidden_size": 32}
_DETR = _DECODER | {"use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 10}
_DETR |= {"backbone_config": _RESNET | {"model_type": "resnet", "out_features": ["stage2"]}}
_WAVE = _TEXT | {"vocab_size": 32, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
_WAVE |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}

# name: (class, config class, config, preprocessor_config.json or None)
MODELS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "bert": ("BertModel", "BertConfig", _BERT, None),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _BERT | {"pad_token_id": 1}, None),
    "distilbert": ("DistilBertForQuestionAnswering", "DistilBertConfig", _DISTILBERT, None),
    "electra": ("ElectraForTokenClassification", "ElectraConfig", _BERT | {"embedding_size": 16}, None),
    "albert": ("AlbertModel", "AlbertConfig", _BERT | {"embedding_size": 16}, None),
    "mpnet": ("MPNetModel", "MPNetConfig", _BERT | {"pad_token_id": 1}, None),
    "deberta-v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", _BERT | _RELATIVE, None),
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
        {"text_config": _CLIP_TEXT, "vision_config": _VIT | {"projection_dim": 16}, "projection_dim": 16},
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
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", _SEGFORMER, {"size": 32}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        None,
    ),
    "detr": ("DetrForObjectDetection", "DetrConfig", _DETR, {"size": {"height": 32, "width": 32}}),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _WAVE,
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
