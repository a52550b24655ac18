"""Records in answers.json what Hugging Face's library makes of configs/ and of tiny folders.

Run from the repository's root with transformers and PyTorch installed, after make_configs.py::

    PYTHONPATH=. python tests/data/hugging_face_configs/make_answers.py

For each file of configs/: the model that it describes, or the error. For each folder of
tests/models/hugging_face/tiny_folders.py: the logits of the last two of TOKENS in float32, the
error, or the tensors that the library makes up.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.core_model_loading import (  # pyright: ignore[reportMissingImports]
    revert_weight_conversion,
)

from tests.models.hugging_face.tiny_folders import FOLDERS

HERE = Path(__file__).parent
TOKENS = [3, 1, 4, 15, 9]
#: Types whose layers do not say what window they have.
ONE_WINDOW = ("mistral", "mixtral")


def described(file: Path) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(str(file))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    _run_small(config)
    # By the names in files, where experts are not stacked.
    stored = revert_weight_conversion(model, model.state_dict())
    shapes = {name: list(value.shape) for name, value in stored.items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    lines = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
    rotary = type(model.model.rotary_emb)(config)
    frequencies = [float(f"{value:.8g}") for value in rotary.inv_freq.tolist()]
    layers = model.model.layers
    everywhere = (
        getattr(config, "sliding_window", None) if config.model_type in ONE_WINDOW else None
    )
    windows = {getattr(layer.self_attn, "sliding_window", everywhere) for layer in layers}
    return {
        "tensors": hashlib.sha256(lines.encode()).hexdigest()[:16],
        "num_heads": config.num_attention_heads,
        "norm_epsilon": model.model.norm.variance_epsilon,
        "tied_head": config.tie_word_embeddings,
        "windows": sorted(windows, key=str),
        "frequencies": frequencies[:: max(1, len(frequencies) // 8)],
        "scaling": rotary.attention_scaling,
        "activation": _activation(getattr(layers[0].mlp, "experts", layers[0].mlp)),
    }


def _activation(module: Any) -> Any:
    """The class of an activation, or the numbers of the one of gpt-oss, which has none."""
    if hasattr(module, "act_fn"):
        return type(module.act_fn).__name__
    return [module.alpha, module.limit]


def _run_small(config: Any) -> None:
    """Some models cannot be run, which is seen only then."""
    small = copy.deepcopy(config)
    small.hidden_size = 8 * small.num_attention_heads
    small.intermediate_size = small.vocab_size = 16
    small.moe_intermediate_size = 16
    small.num_hidden_layers, small.pad_token_id = 1, None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    transformers.AutoModelForCausalLM.from_config(small)(torch.tensor([[1, 2, 3]]))


def answered(folder: Path) -> dict[str, Any]:
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True
    )
    if loaded["missing_keys"]:
        return {"made_up": sorted(loaded["missing_keys"])}
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    # The last tokens attend to all others.
    rounded = [[float(f"{value:.7g}") for value in row] for row in logits[-2:].tolist()]
    return {"not_expected": sorted(loaded["unexpected_keys"]), "logits": rounded}


def or_error(step: Any, argument: Any) -> dict[str, Any]:
    try:
        return step(argument)
    except Exception as error:
        return {"error": type(error).__name__}


def main() -> None:
    transformers.logging.set_verbosity_error()
    configs = {
        file.stem: or_error(described, file) for file in sorted((HERE / "configs").glob("*.json"))
    }
    folders = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, write) in enumerate(FOLDERS.items()):
            folder = Path(scratch) / str(number)
            write(folder)
            folders[name] = or_error(answered, folder)
    about = {"transformers": transformers.__version__, "tokens": TOKENS}
    groups = {"configs": configs, "folders": folders}
    lines = [f' "about": {json.dumps(about)}']
    for group, answers in groups.items():
        inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(answers[name])}" for name in answers)
        lines.append(f' "{group}": {{\n{inner}\n }}')
    (HERE / "answers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
