"""Writes the config.json files of configs/: as releases and tools have written them over the years.

Run from the repository's root, and then make_answers.py::

    python tests/data/hugging_face_configs/make_configs.py

Sizes are those of published models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3: dict[str, Any] = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "vocab_size": 128256,
}
LONG = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_1 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": LONG,
    "transformers_version": "4.43.0.dev0",
}
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3: dict[str, Any] = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.51.0",
    "vocab_size": 151936,
}
MIXTRAL: dict[str, Any] = without(MISTRAL, "sliding_window") | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "transformers_version": "4.36.0.dev0",
}
QWEN3_MOE: dict[str, Any] = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}


def version_5(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The form that the library writes since version 5."""
    rotary = {"rope_type": "default", **(values.get("rope_scaling") or {})}
    rotary["rope_theta"] = values.get("rope_theta", 10000.0)
    new = {"dtype": values["torch_dtype"], "pad_token_id": None, "rope_parameters": rotary}
    old = without(values, "torch_dtype", "rope_scaling", "rope_theta")
    return old | new | {"transformers_version": "5.0.0"} | changes


GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
CASES: dict[str, dict[str, Any]] = {
    # Llama 1, converted before there were key-value heads; its padding token does not exist.
    "llama-1": without(LLAMA, "tie_word_embeddings")
    | {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_position_embeddings": 2048,
        "max_sequence_length": 2048,
        "pad_token_id": -1,
        "rms_norm_eps": 1e-06,
        "transformers_version": "4.27.0.dev0",
    },
    "llama-2": LLAMA
    | {"_name_or_path": "x", "num_key_value_heads": 32, "pretraining_tp": 1, "rope_scaling": None},
    "llama-2-70b": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
    },
    "llama-2-generation-keys": LLAMA
    | {"do_sample": True, "max_length": 4096, "temperature": 0.9, "top_p": 0.6},
    # What a tool writes that saves all attributes, rather than those that differ from defaults.
    "llama-2-all-keys": LLAMA
    | {
        "_commit_hash": None,
        "add_cross_attention": False,
        "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": None,
        "diversity_penalty": 0.0,
        "do_sample": False,
        "early_stopping": False,
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "is_decoder": False,
        "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "max_length": 20,
        "num_beams": 1,
        "output_scores": False,
        "pruned_heads": {},
        "return_dict": True,
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
        "torchscript": False,
        "use_bfloat16": False,
    },
    "code-llama": LLAMA
    | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
    "tiny-llama": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "torch_dtype": "float32",
    },
    "llama-linear": LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "llama-dynamic": LLAMA | {"rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": False},
    "llama-3": LLAMA_3,
    "llama-3.1": LLAMA_3_1,
    "llama-3.1-both-types": LLAMA_3_1 | {"rope_scaling": LONG | {"type": "llama3"}},
    "llama-3.1-no-original-context": LLAMA_3_1
    | {"rope_scaling": without(LONG, "original_max_position_embeddings")},
    "llama-3.1-old-and-new-keys": LLAMA_3_1
    | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "llama-3.1-version-5": version_5(LLAMA_3_1, head_dim=128),
    "llama-3.2": LLAMA_3_1
    | {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": LONG | {"factor": 32.0},
        "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    },
    "llama-3.2-fine-tuned": LLAMA_3_1
    | {"pad_token_id": 128004, "unsloth_fixed": True, "unsloth_version": "2024.9", "head_dim": 128},
    "smol-llama": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
        "vocab_size": 49152,
    },
    "llama-4-bits": LLAMA_3
    | {"quantization_config": {"bits": 4, "group_size": 128, "quant_method": "gptq"}},
    "llama-no-keys": {"model_type": "llama"},
    "llama-classifier": LLAMA_3 | {"architectures": ["LlamaForSequenceClassification"]},
    "llama-odd-heads": LLAMA | {"num_attention_heads": 33},
    "llama-text-for-false": LLAMA | {"tie_word_embeddings": "false"},
    "llama-null-size": LLAMA | {"hidden_size": None},
    "llama-float-size": LLAMA | {"vocab_size": 32000.0},
    "llama-swish": LLAMA | {"hidden_act": "swish"},
    "llama-gelu": LLAMA | {"hidden_act": "gelu"},
    "mistral-v0.1": MISTRAL,
    "mistral-v0.1-no-window-key": without(MISTRAL, "sliding_window"),
    "mistral-v0.2": MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None},
    "mistral-few-keys": without(MISTRAL, "num_key_value_heads", "sliding_window", "rope_theta"),
    "mistral-nemo": MISTRAL
    | {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 1024000,
        "num_hidden_layers": 40,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "mistral-version-5": version_5(MISTRAL, head_dim=None),
    "qwen2": QWEN2,
    "qwen2.5": QWEN2
    | {
        "eos_token_id": 151643,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "vocab_size": 151936,
    },
    "qwen2.5-yarn": QWEN2 | {"rope_scaling": YARN},
    "qwen2.5-yarn-version-5": version_5(
        QWEN2 | {"rope_scaling": without(YARN, "type") | {"rope_type": "yarn"}}
    ),
    "qwen3-yarn": QWEN3
    | {
        "max_position_embeddings": 131072,
        "rope_scaling": YARN | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2},
    },
    "qwen3-yarn-few-keys": QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    "llama-yarn-untruncated": LLAMA
    | {"rope_scaling": YARN | {"truncate": False, "original_max_position_embeddings": 1024}},
    "llama-yarn-mscale": LLAMA
    | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 1.5, "rope_type": "yarn"}},
    "llama-yarn-no-factor": LLAMA
    | {"rope_scaling": YARN | {"factor": None, "original_max_position_embeddings": 512}},
    "llama-yarn-short-context": LLAMA
    | {"rope_scaling": YARN | {"original_max_position_embeddings": 4, "factor": 1000}},
    "mistral-yarn": MISTRAL
    | {
        "rope_scaling": YARN | {"original_max_position_embeddings": 8192, "factor": 16.0},
        "rope_theta": 10000.0,
    },
    "qwen2.5-dual-chunk": QWEN2
    | {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
    "qwen2-few-keys": without(QWEN2, "num_key_value_heads", "use_sliding_window", "sliding_window")
    | {"hidden_size": 4096, "num_attention_heads": 32},
    "qwen2-window": without(QWEN2, "max_window_layers", "sliding_window")
    | {"num_hidden_layers": 32, "use_sliding_window": True},
    "qwen2-window-of-all-layers": QWEN2
    | {"max_window_layers": 0, "sliding_window": 4096, "use_sliding_window": True},
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-no-head-size": without(QWEN3, "head_dim") | {"hidden_size": 2560},
    "qwen3-version-5": version_5(QWEN3, layer_types=["full_attention"] * 36),
    "qwen3-mixed-layers": QWEN3
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 4096,
        "use_sliding_window": True,
    },
    "mixtral": MIXTRAL,
    "mixtral-version-5": version_5(MIXTRAL, head_dim=None, router_jitter_noise=0.0),
    "mixtral-jitter": MIXTRAL | {"router_jitter_noise": 0.01},
    "mixtral-few-keys": without(
        MIXTRAL, "num_local_experts", "num_experts_per_tok", "rms_norm_eps", "rope_theta"
    ),
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-version-5": without(
        version_5(QWEN3_MOE, num_local_experts=128), "num_experts", "max_window_layers"
    ),
    "qwen3-moe-few-keys": without(
        QWEN3_MOE,
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "moe_intermediate_size",
        "hidden_size",
        "mlp_only_layers",
        "num_hidden_layers",
    ),
    "qwen3-moe-dense-layers": QWEN3_MOE | {"mlp_only_layers": [0, 47]},
    "qwen3-moe-every-second": QWEN3_MOE | {"decoder_sparse_step": 2},
    "gpt-oss": GPT_OSS,
    "gpt-oss-not-quantized": without(GPT_OSS, "quantization_config"),
    "gpt-oss-version-5": version_5(
        without(GPT_OSS, "quantization_config", "experts_per_token", "initial_context_length")
        | {"torch_dtype": "bfloat16"},
        swiglu_alpha=1.702,
    ),
    "gpt-oss-few-keys": without(
        GPT_OSS, "rope_scaling", "rope_theta", "layer_types", "num_local_experts", "head_dim"
    ),
    "gpt-oss-no-scaling": version_5(GPT_OSS | {"torch_dtype": "bfloat16"})
    | {"rope_parameters": {"rope_theta": 150000.0, "rope_type": "default"}},
    "gpt-oss-no-biases": GPT_OSS | {"attention_bias": False},
    "gpt-oss-no-windows": GPT_OSS | {"layer_types": ["full_attention"] * 24},
    "gpt-oss-all-windows": GPT_OSS | {"layer_types": ["sliding_attention"] * 24},
    "gpt-oss-every-third": GPT_OSS
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 8},
    "gpt-oss-full-first": GPT_OSS | {"layer_types": ["full_attention", "sliding_attention"] * 12},
    "gpt-oss-another-limit": GPT_OSS | {"swiglu_limit": 5.0},
    "gpt-oss-another-format": GPT_OSS | {"quantization_config": {"quant_method": "fp8"}},
    "qwen3-window-not-in-use": QWEN3 | {"layer_types": ["sliding_attention"] * 36},
}
_TEXT = json.dumps(LLAMA)
#: Files that are no JSON, or JSON of a kind.
TEXTS: dict[str, str] = {
    "text-byte-order-mark": "\ufeff" + _TEXT,
    "text-not-a-number": _TEXT.replace("1e-05", "NaN"),
    "text-cut-off": _TEXT[:200],
    "text-list": f"[{_TEXT}]",
    "text-page": "<!DOCTYPE html>\n<html><body>Access to this model is restricted.</body></html>\n",
    "text-large-number": _TEXT.replace("4096", "1" + "0" * 5000, 1),
    "text-deep": '{"model_type": "llama", "id2label": ' + "[" * 2000 + "]" * 2000 + "}",
}


def main() -> None:
    CONFIGS.mkdir(exist_ok=True)
    for name, values in CASES.items():
        lines = json.dumps(values, indent=1, sort_keys=True)
        (CONFIGS / f"{name}.json").write_text(lines + "\n", encoding="utf-8")
    for name, text in TEXTS.items():
        (CONFIGS / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
