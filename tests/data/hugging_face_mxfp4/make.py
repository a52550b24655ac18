"""Makes model/, a tiny gpt-oss in the files of the published ones: experts in MXFP4.

Run from the repository's root with PyTorch and transformers installed::

    python tests/data/hugging_face_mxfp4/make.py

expected.npz has tokens int32 [B, S], the logits float32 [B, S, vocabulary] that Hugging Face's
library computes for them on the CPU in float32, for which it dequantizes the experts, and what it
makes of their tensors, as float32, by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
PACKED = ("gate_up_proj", "down_proj")


def main() -> None:
    folder = HERE / "model"
    folder.mkdir(exist_ok=True)
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        max_position_embeddings=64,
    )
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith(PACKED):
            experts, rows, columns = value.shape
            shape = experts, columns, rows // 32
            for kind, drawn in (("blocks", (0, 256, (*shape, 16))), ("scales", (118, 126, shape))):
                drawn = torch.randint(*drawn, dtype=torch.uint8, generator=generator)
                tensors[f"{name}_{kind}"] = drawn
        else:
            noise = 0.3 * torch.randn(value.shape, generator=generator)
            tensors[name] = (1 + noise if "norm" in name else noise).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            "quant_method": "mxfp4",
        },
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    read = transformers.GptOssForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    unpacked = {
        name: value.float().numpy()
        for name, value in read.state_dict().items()
        if name.endswith(PACKED)
    }
    tokens = np.random.default_rng(0).integers(0, 64, (1, 12), dtype=np.int32)
    # Frequencies of the rotary embedding are made anew: they were rounded with the parameters.
    wide = transformers.GptOssForCausalLM(read.config).to(torch.float32)
    wide.load_state_dict(read.state_dict())
    with torch.no_grad():
        logits = wide(torch.from_numpy(tokens).long()).logits.numpy()
    np.savez_compressed(HERE / "expected.npz", tokens=tokens, logits=logits, **unpacked)


if __name__ == "__main__":
    main()
