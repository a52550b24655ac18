"""Makes the adapters of this folder, with PEFT on the CPU.

Run from the repository's root with PyTorch, transformers and peft installed::

    python tests/data/peft_adapters/make.py

Each folder has the adapter of the model of its name in tests/data/hugging_face, as PEFT saves it,
and expected.npz: tokens int32 [B, S] and the logits float32 [B, S, vocabulary] that PEFT computes
in float32, with the adapter not merged. A and B are random: PEFT's B begins with zeros.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama3": dict(
        r=5,
        lora_alpha=7,
        target_modules=ALL,
        rank_pattern={"layers.1.self_attn.q_proj": 3, "down_proj": 2},
        alpha_pattern={"up_proj": 11},
    ),
    "qwen3": dict(r=3, lora_alpha=4, target_modules="all-linear", use_rslora=True),
    "mistral": dict(r=7, lora_alpha=9, target_modules=r".*\.1\.self_attn\.[qkv]_proj"),
}


def main() -> None:
    for name, values in ADAPTERS.items():
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_pretrained(
            HERE.parent / "hugging_face" / name, dtype=torch.float32, attn_implementation="eager"
        )
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **values)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_(std=0.1)
            tokens = np.random.default_rng(0).integers(0, 256, (1, 16), np.int32)
            logits = model(torch.from_numpy(tokens).long()).logits.numpy()
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.peft_config["default"].base_model_name_or_path = name
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink()
        np.savez_compressed(HERE / name / "expected.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    main()
