"""Records in defaults.json what Hugging Face's configuration classes say about each key.

Run from the repository's root with transformers installed::

    python tests/data/hugging_face_configs/make_defaults.py

For each family: the default of every key of its class, the sample values that the class takes for
it, and the values of a config.json without any key.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gpt_oss": transformers.GptOssConfig,
}
#: Values of each JSON type. Every key is tried with each of them.
SAMPLES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 0.0, 0.5, 2.0, "", "false", "silu", "swish", "gelu", "float32",
    [], [1], [True], ["x"], {}, {"x": 1},
]  # fmt: skip


def takes(kind: Any, name: str, value: Any) -> bool:
    """Whether a class takes a value of a key, whatever the other keys are."""
    try:
        setattr(kind(), name, copy.deepcopy(value))
    except Exception:
        return False
    return True


def main() -> None:
    transformers.logging.set_verbosity_error()
    table: dict[str, Any] = {
        "about": {"transformers": transformers.__version__, "samples": SAMPLES},
    }
    for family, kind in CLASSES.items():
        fields = {field.name: field.default for field in dataclasses.fields(kind)}
        table[family] = {
            "defaults": {name: fields[name] for name in sorted(fields)},
            "taken": {
                name: [number for number, value in enumerate(SAMPLES) if takes(kind, name, value)]
                for name in sorted(fields)
            },
            "without_keys": {
                name: value
                for name, value in sorted(kind().to_dict().items())
                if name in fields and name != "transformers_version"
            },
        }
    (HERE / "defaults.json").write_text(_text(table))


def _text(value: Any, depth: int = 0) -> str:
    """JSON with a line for each key of the outer three objects."""
    if depth == 3 or not isinstance(value, dict):
        return json.dumps(value)
    space = " " * (depth + 1)
    lines = (f"{space}{json.dumps(k)}: {_text(v, depth + 1)}" for k, v in value.items())
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + "\n" * (depth == 0)


if __name__ == "__main__":
    main()
