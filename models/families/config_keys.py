"""The keys of a Hugging Face config.json: what each may be, and what a file without it means."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Keys that say nothing about the mathematics of a model, in the files of any family.
WITHOUT_INFLUENCE = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_flash_attn_2_enabled", "_name_or_path", "add_cross_attention", "attn_implementation",
    "chunk_size_feed_forward", "finetuning_task", "gradient_checkpointing", "id2label",
    "is_decoder", "is_encoder_decoder",
    "is_llama_config", "label2id", "max_sequence_length", "neftune_noise_alpha",
    "output_attentions", "output_hidden_states", "prefix", "problem_type", "pruned_heads",
    "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "torchscript", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    # How answers are drawn, which generation_config.json says.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A set of JSON values.

    Attributes:
      words: what they are, as in "an integer".
      contains: whether a value is one of them.
    """

    words: str
    contains: Callable[[Any], bool]


def integers(low: int, high: int = 2**31 - 1) -> Kind:
    """Integers of a range, ends included. JSON's 8.0 and true are none."""

    def contains(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return Kind(f"an integer from {low} to {high}", contains)


def numbers(low: float, high: float = math.inf, *, open_low: bool = False) -> Kind:
    """Finite numbers of a range, ends included unless `open_low`."""

    def contains(value: Any) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        # Comparisons with NaN are false; float32 holds what is below its largest number.
        return (low < value if open_low else low <= value) and value <= min(high, _LARGEST)

    words = f"{'more than' if open_low else 'at least'} {low:g}"
    limit = f" and at most {high:g}" if high <= _LARGEST else ""
    return Kind(f"a finite number of {words}{limit}", contains)


def fractions(low: float = 0) -> Kind:
    """Numbers up to 1 with a decimal point, as Hugging Face's library wants some keys."""
    among = numbers(low, 1)
    return Kind(
        among.words.replace("number", "number with a decimal point,"),
        lambda value: isinstance(value, float) and among.contains(value),
    )


def or_null(kind: Kind) -> Kind:
    """The values of a kind, and null."""
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.contains(value))


def lists(kind: Kind, words: str) -> Kind:
    """Lists of values of a kind."""
    return Kind(words, lambda value: isinstance(value, list) and all(map(kind.contains, value)))


_LARGEST = 3.4e38
SIZE = integers(1)
POSITIVE = numbers(0, open_low=True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
TEXTS = lists(TEXT, "a list of strings")
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TOKEN = integers(-(2**63), 2**63 - 1)
_TOKEN_LIST = lists(TOKEN, "a list of integers")
TOKENS = Kind(
    "an integer or a list of integers",
    lambda value: TOKEN.contains(value) or _TOKEN_LIST.contains(value),
)


@dataclass(frozen=True)
class Key:
    """A key of config.json.

    Attributes:
      name: its name.
      kind: the values that it may have.
      default: what a file means that has no such key: the default of Hugging Face's library.
      supported: the values that this library has code for; empty if that is all of them.
    """

    name: str
    kind: Kind
    default: Any
    supported: tuple[Any, ...] = ()


class ConfigValues(Mapping[str, Any]):
    """The values of keys, each of its kind, with defaults for those that a file leaves out.

    Args:
      values: the JSON object.
      keys: its keys.
      ignored: names of other keys that it may have.
      place: what the object is called in sentences.

    Raises:
      ValueError: if a value is not of its key's kind or is not supported, or a key is not known and
        has a value other than null.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        keys: Iterable[Key],
        *,
        ignored: Iterable[str] = (),
        place: str = "config.json",
    ):
        self._given = values
        self._keys = {key.name: key for key in keys}
        self._place = place
        known = {*self._keys, *ignored}
        for key in self._keys.values():
            if key.name in values:
                self._check(key, values[key.name])
        for name, value in values.items():
            if name not in known and value is not None:
                raise ValueError(
                    f"{place}: {shown_name(name)}={shown(value)} is not known and may change what"
                    " the model computes; remove the key if it does not"
                )

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name, self._keys[name].default)

    def __iter__(self) -> Any:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, name: str) -> bool:
        """Whether the file has a key."""
        return name in self._given

    def _check(self, key: Key, value: Any) -> None:
        if not key.kind.contains(value):
            raise ValueError(
                f"{self._place}: {key.name}={shown(value)}: expected {key.kind.words}; give the"
                " file that the model came with"
            )
        if key.supported and value not in key.supported:
            expected = " or ".join(map(repr, key.supported))
            raise ValueError(
                f"{self._place}: {key.name}={shown(value)} is not supported; expected {expected},"
                " so that the model computes what it was trained to"
            )


def merged(keys: Sequence[Key], *others: Key) -> tuple[Key, ...]:
    """Keys, of which others take the place of those of the same name."""
    return tuple({key.name: key for key in (*keys, *others)}.values())


def shown(value: Any) -> str:
    """A value of a file in a sentence, however large it is."""
    return _shortened.repr(value)


def shown_name(name: str) -> str:
    """A name of a file: as it is if it is a usual one, else as `shown`."""
    return name if _USUAL.fullmatch(name) else shown(name)


_USUAL = re.compile(r"[A-Za-z_][\w./-]{0,120}", re.ASCII)
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80
_shortened.maxlevel = 3
