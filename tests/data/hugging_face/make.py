"""Makes the tiny models of this folder, with Hugging Face's own library on the CPU.

Run from the repository's root with PyTorch and transformers installed::

    python tests/data/hugging_face/make.py

Each folder has the files that a published model has, and expected.npz: tokens int32 [B, S] and the
logits float32 [B, S, vocabulary] that the library computes for them in float32.
"""

from __future__ import annotations

import json
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


def main() -> None:
    for seed, (name, (family, dtype, shard, changes)) in enumerate(MODELS.items()):
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
        with torch.no_grad():
            logits = saved(torch.from_numpy(tokens).long()).logits
        np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits.numpy())


if __name__ == "__main__":
    main()
