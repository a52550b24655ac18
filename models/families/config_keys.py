"""The keys of a Hugging Face config.json, each read once, so that none is overlooked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keys that say nothing about the mathematics of a model.
_WITHOUT_INFLUENCE = {
    "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures",
    "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "finetuning_task", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "return_dict", "sep_token_id",
    "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip

_REQUIRED = object()


class ConfigKeys:
    """The contents of a config.json.

    Args:
      values: the JSON object.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)
        self._read = set(_WITHOUT_INFLUENCE)

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key. A key that is absent or null has the default.

        Raises:
          ValueError: if it is absent and there is no default.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"config.json has no {name!r}; give the file that the model came with")
        return default

    def expect(self, name: str, *values: Any) -> None:
        """Reads a key whose other values this library has no code for; the first is the default.

        Raises:
          ValueError: if it has another value.
        """
        value = self.take(name, values[0])
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(
                f"config.json: {name}={value!r} is not supported; expected {expected}, so that the"
                " model computes what it was trained to"
            )

    def finish(self) -> None:
        """Checks that all keys were read.

        Raises:
          ValueError: if one was not and says something.
        """
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                raise ValueError(
                    f"config.json: {name}={value!r} is not known and may change what the model"
                    " computes; remove the key if it does not"
                )
