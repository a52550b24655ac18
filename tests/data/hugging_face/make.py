"""Makes the tiny models of this folder, with Hugging Face's own library on the CPU.

Run from the repository's root with PyTorch and transformers installed::

    python tests/data/hugging_face/make.py

Each folder has the files that a published model has, and expected.npz: tokens int32 [B, S] and the
logits float32 [B, S, vocabulary] that the library computes for them in float32. For models with
experts also router_loss, and answer, the likeliest tokens after the first four.

With names of models as arguments, it makes these only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

HERE = Path(__file__).parent
SIZES: dict[str, Any] = dict(
    vocab_size=288,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=256,
    eos_token_id=257,
)
LLAMA3_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
BASE = {"rope_type": "default", "rope_theta": 10000.0}
BATCH, SEQUENCE = 1, 16
#: Class, dtype of the file, bytes of a file at most, and what differs from `SIZES`.
MODELS: dict[str, tuple[str, torch.dtype, int, dict[str, Any]]] = {
    "llama3": ("Llama", torch.bfloat16, 10**9, {"rope_parameters": LLAMA3_ROTARY}),
    "llama3.2": (
        "Llama",
        torch.bfloat16,
        10**9,
        {"rope_parameters": LLAMA3_ROTARY, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", torch.bfloat16, 20_000, {"sliding_window": 5, "rope_parameters": BASE}),
    "mistral-no-window": (
        "Mistral",
        torch.bfloat16,
        10**9,
        {"sliding_window": None, "rope_parameters": BASE},
    ),
    "qwen2": ("Qwen2", torch.bfloat16, 20_000, {"rope_parameters": BASE, "rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3", torch.float32, 10**9, {"head_dim": 12, "rope_parameters": BASE}),
    "mixtral": (
        "Mixtral",
        torch.bfloat16,
        40_000,
        {"num_local_experts": 4, "intermediate_size": 24, "router_aux_loss_coef": 0.02},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        torch.float32,
        10**9,
        {
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-not-normalized": (
        "Qwen3Moe",
        torch.bfloat16,
        10**9,
        {
            "head_dim": 12,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "gpt-oss": (
        "GptOss",
        torch.bfloat16,
        20_000,
        {
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": YARN,
        },
    ),
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|end|>")


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter values that matter; biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gate_up_proj_bias"):  # Some of gate and up are beyond their limits.
            noise *= 15
        with torch.no_grad():
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)


def make_tokenizer(folder: Path) -> None:
    """Bytes, and four special tokens: as the tokenizers of the families, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 256)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[3],
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def answers(model: Any, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Outputs of the model that are recorded beside the tokens."""
    with torch.no_grad():
        if not hasattr(model.config, "router_aux_loss_coef"):
            return {"logits": model(tokens).logits.numpy()}
        found = model(tokens, output_router_logits=True)
        answer = model.generate(
            tokens[:, :4], do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
    return {
        "logits": found.logits.numpy(),
        "router_loss": found.aux_loss.numpy(),
        "answer": answer[0, 4:].numpy().astype(np.int32),
    }


def main() -> None:
    for seed, (name, (family, dtype, shard, changes)) in enumerate(MODELS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        config = getattr(transformers, f"{family}Config")(**SIZES | changes)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        randomize(model, seed)
        model = model.to(dtype)
        folder = HERE / name
        model.generation_config.eos_token_id = [257, 259]
        model.save_pretrained(folder, max_shard_size=shard)
        make_tokenizer(folder)
        # Read anew: frequencies of the rotary embedding were rounded with the parameters.
        saved = type(model).from_pretrained(folder, dtype=torch.float32)
        tokens = np.random.default_rng(seed).integers(0, 288, (BATCH, SEQUENCE), dtype=np.int32)
        expected = {"tokens": tokens, **answers(saved, torch.from_numpy(tokens).long())}
        np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    main()
