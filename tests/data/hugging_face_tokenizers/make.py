"""Makes small tokenizers of the kinds that published models have, and records what Hugging Face's
library answers for each.

Run from the repository's root with PyTorch, transformers 5.24 and tokenizers installed::

    python -m tests.data.hugging_face_tokenizers.make

Each folder has the files of a published model that a tokenizer consists of, and expected.json with
the answers: tokens of texts with and without special tokens, texts of random tokens, what random
tokens add to a text, the token that ends a text, and a conversation as its chat template writes it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.data.hugging_face_tokenizers.kinds import (
    CONTROLS,
    LLAMA3_REGEX,
    MISTRAL_REGEX,
    QWEN_REGEX,
    byte_level,
    sentence_piece,
    unigram,
    with_beginning,
    words,
)

HERE = Path(__file__).parent
#: What is encoded. Some have names of special tokens, as a user may write them.
TEXTS = [
    "", " ", "   ", "\n", "a", "Hello", " Hello", "Hello ", "Hello  world", "The ring turns.",
    "the ring\n\n\nturns\r\n\tand  turns ", "Größe und Übung", "cafe\u0301 déjà", "環は回り、",
    "\U0001f642\U0001f469\u200d\U0001f4bb!", "don't I'LL we'Ve", "1234567 89% 3.14", "x = y[0]",
    "<s>", "</s>", "<s>Hello</s>", "a </s> b", "a<|im_end|>\nb", "<|endoftext|> a", "<s> [INST] a",
    "\u2581a\u2581\u2581b", "<0x41><0xFF>", "word<mask>word <mask> word", "x<tool>y <tool> z",
    "ab<key>cd <key> Ab<KEY>", "\x00\x01", "\ufeffa", "\ufffd", "ſ ﬁ ½ Å", "a\u0300\u0301\u0302",
]  # fmt: skip
BRACKETS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MARKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] +"
    " '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Hello, what turns?"},
    {"role": "assistant", "content": "The ring."},
    {"role": "user", "content": "Größe? </s> don't"},
]


# Folders


def folders() -> Iterator[tuple[str, Tokenizer, dict[str, dict[str, Any]]]]:
    """Name, tokenizer, and the other files of each folder."""
    llama, mistral = {"model_type": "llama"}, {"model_type": "mistral"}
    qwen2, qwen3 = {"model_type": "qwen2"}, {"model_type": "qwen3"}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}

    def token(content: str, **more: bool) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {"content": content, **flags, **more}

    controls = {f"{k}_token": v for k, v in zip(("unk", "bos", "eos"), CONTROLS, strict=True)}
    objects = {name: token(content) for name, content in controls.items()}
    typed = {name: {"__type": "AddedToken", **value} for name, value in objects.items()}
    added = {str(number): token(content, special=True) for number, content in enumerate(CONTROLS)}

    legacy = sentence_piece(byte_fallback=True, scheme="normalizer")
    yield "llama2", legacy, {
        "tokenizer_config.json": {
            **fast, **typed, "legacy": True, "add_bos_token": True, "add_eos_token": False,
            "clean_up_tokenization_spaces": False, "chat_template": BRACKETS,
            "model_max_length": 1000000000000000019884624838656,
        },
        "special_tokens_map.json": objects,
        "config.json": llama | {"bos_token_id": 1, "eos_token_id": 2},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }  # fmt: skip
    yield "llama2-class", legacy, {
        "tokenizer_config.json": {
            **typed, "tokenizer_class": "LlamaTokenizer", "legacy": False,
            "added_tokens_decoder": added, "chat_template": BRACKETS,
        },
        "config.json": llama | {"eos_token_id": 2},
    }  # fmt: skip
    yield "llama2-metaspace", sentence_piece(byte_fallback=True, scheme="first"), {
        "tokenizer_config.json": {
            **controls, "tokenizer_class": "LlamaTokenizer", "legacy": False,
            "chat_template": BRACKETS,
        },
        "config.json": llama | {"eos_token_id": 2},
    }  # fmt: skip
    yield (
        "llama2-always",
        sentence_piece(byte_fallback=True, scheme="always"),
        {
            "tokenizer_config.json": {**fast, **controls},
            "config.json": llama,
            "generation_config.json": {"eos_token_id": [2]},
        },
    )
    yield (
        "llama2-never",
        sentence_piece(byte_fallback=True, scheme="never"),
        {
            "tokenizer_config.json": {**fast, **controls, "add_prefix_space": False},
            "config.json": llama,
        },
    )
    yield (
        "llama2-no-bytes",
        sentence_piece(byte_fallback=False, scheme="first"),
        {
            "tokenizer_config.json": {**fast, "bos_token": "<s>", "unk_token": "<unk>"},
            # Files of older releases have special tokens here alone.
            "special_tokens_map.json": {"eos_token": "</s>", "pad_token": "</s>"},
            "config.json": llama,
        },
    )
    flagged = sentence_piece(byte_fallback=True, scheme="normalizer")
    flagged.add_tokens(
        [
            AddedToken("<mask>", lstrip=True, special=True, normalized=False),
            AddedToken("<tool>", rstrip=True, special=False, normalized=False),
            AddedToken("<key>", single_word=True, special=False, normalized=True),
            AddedToken("<KEY>", lstrip=True, rstrip=True, special=False, normalized=True),
            AddedToken("<|im_end|>", special=True, normalized=False),
        ]
    )
    yield "llama2-added-tokens", flagged, {
        "tokenizer_config.json": {
            **fast, **controls, "eos_token": "<|im_end|>", "pad_token": None,
            "additional_special_tokens": ["<mask>", "<|im_end|>"],
        },
        "config.json": llama | {"eos_token_id": 2},
    }  # fmt: skip
    llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
              "<|eot_id|>", "<|python_tag|>"]  # fmt: skip
    made = byte_level(LLAMA3_REGEX, llama3, ignore_merges=True)
    with_beginning(made, llama3[0], processors.ByteLevel(trim_offsets=True))
    begin, end, turn = (made.token_to_id(llama3[number]) for number in (0, 1, 4))
    yield "llama3", made, {
        "tokenizer_config.json": {
            **fast, "bos_token": llama3[0], "eos_token": llama3[1],
            "clean_up_tokenization_spaces": True, "model_max_length": 131072,
        },
        "special_tokens_map.json": {"bos_token": llama3[0], "eos_token": llama3[1]},
        "config.json": llama | {"bos_token_id": begin, "eos_token_id": end},
        "generation_config.json": {"eos_token_id": end, "do_sample": True, "temperature": 0.6},
    }  # fmt: skip
    yield "llama3-instruct", made, {
        "tokenizer_config.json": {
            **fast, "bos_token": llama3[0], "eos_token": llama3[4], "chat_template": HEADERS,
            "clean_up_tokenization_spaces": True,
        },
        "special_tokens_map.json": {"bos_token": token(llama3[0]), "eos_token": token(llama3[4])},
        "config.json": llama | {"bos_token_id": begin, "eos_token_id": [end, turn]},
        "generation_config.json": {"eos_token_id": [end, turn]},
    }  # fmt: skip
    yield "mistral", sentence_piece(byte_fallback=True, scheme="normalizer"), {
        "tokenizer_config.json": {
            **controls, "tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True,
            "add_eos_token": False, "additional_special_tokens": [], "chat_template": BRACKETS,
        },
        "special_tokens_map.json": objects,
        "config.json": mistral | {"eos_token_id": 2},
        "generation_config.json": {"_from_model_config": True, "eos_token_id": 2},
    }  # fmt: skip
    instruct = sentence_piece(byte_fallback=True, scheme="first", extra=("[INST]", "[/INST]"))
    yield "mistral-instruct", instruct, {
        "tokenizer_config.json": {
            **controls, "tokenizer_class": "LlamaTokenizer", "legacy": False,
            "chat_template": BRACKETS.replace("'[INST] '", "'[INST]'"),
        },
        "config.json": mistral | {"eos_token_id": 2},
    }  # fmt: skip
    tekken = byte_level(MISTRAL_REGEX, [*CONTROLS, "[INST]", "[/INST]"], ignore_merges=True)
    yield (
        "mistral-bytes",
        with_beginning(tekken, "<s>"),
        {
            "tokenizer_config.json": {**fast, **controls, "chat_template": BRACKETS},
            "config.json": mistral | {"eos_token_id": tekken.token_to_id("</s>")},
        },
    )
    qwen = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # The vocabulary has it as ordinary text.
    made = byte_level(QWEN_REGEX, qwen, normalizer=normalizers.NFC(), ordinary=("</s>",))
    end, turn = made.token_to_id(qwen[0]), made.token_to_id(qwen[2])
    numbered = {str(made.token_to_id(name)): token(name, special=True) for name in qwen}
    qwen_settings = {
        "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False,
        "bos_token": None, "pad_token": qwen[0], "unk_token": None, "errors": "replace",
        "added_tokens_decoder": numbered, "additional_special_tokens": qwen[1:],
        "split_special_tokens": False, "chat_template": MARKS,
    }  # fmt: skip
    yield (
        "qwen2.5",
        made,
        {
            "tokenizer_config.json": qwen_settings | {"eos_token": qwen[0]},
            "config.json": qwen2 | {"bos_token_id": end, "eos_token_id": end},
            "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
        },
    )
    yield (
        "qwen2.5-instruct",
        made,
        {
            "tokenizer_config.json": qwen_settings | {"eos_token": qwen[2]},
            "config.json": qwen2 | {"bos_token_id": end, "eos_token_id": turn},
            "generation_config.json": {"bos_token_id": end, "eos_token_id": [turn, end]},
        },
    )
    made = byte_level(QWEN_REGEX, qwen, normalizer=normalizers.NFC(), ordinary=("</s>",))
    made.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "<tool>")])
    thoughts = {str(made.token_to_id(name)): token(name) for name in ("<think>", "<tool>")}
    yield (
        "qwen3",
        made,
        {
            "tokenizer_config.json": qwen_settings
            | {"eos_token": qwen[2], "added_tokens_decoder": numbered | thoughts},
            "config.json": qwen3 | {"bos_token_id": end, "eos_token_id": turn},
            "generation_config.json": {"eos_token_id": [turn, end], "top_k": 20},
        },
    )
    yield (
        "unigram-bytes",
        unigram(byte_fallback=True),
        {
            "tokenizer_config.json": {**fast, **typed},
            "config.json": llama | {"eos_token_id": 2},
        },
    )
    yield (
        "unigram",
        unigram(byte_fallback=False),
        {
            "config.json": mistral | {"eos_token_id": 2},
            "generation_config.json": {"eos_token_id": [2]},
        },
    )
    yield (
        "words",
        words(),
        {
            "tokenizer_config.json": {**fast, "unk_token": "[UNK]", "eos_token": "[EOS]"},
            "config.json": llama,
        },
    )
    cut = byte_level(None, ["<|endoftext|>"], add_prefix_space=True)
    cut.enable_truncation(16)
    cut.enable_padding(
        length=64, pad_id=cut.token_to_id("<|endoftext|>"), pad_token="<|endoftext|>"
    )
    yield "cut-and-padded", cut, {
        "tokenizer_config.json": {
            **fast, "eos_token": "<|endoftext|>", "add_prefix_space": True, "max_length": 16,
        },
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
        "config.json": llama,
    }  # fmt: skip
    # Both are in the vocabulary, and a file alone says that they are special.
    undeclared = byte_level(None, [], ordinary=("</s>", "<s>"))
    undeclared.add_tokens([AddedToken("<s>", normalized=False)])
    yield (
        "undeclared",
        undeclared,
        {
            "tokenizer_config.json": {**fast, "eos_token": "</s>", "bos_token": "<s>"},
            "config.json": llama,
        },
    )


# Answers


def answers(tokenizer: Any) -> dict[str, Any]:
    chance = random.Random(0)
    known = sorted(tokenizer.get_vocab().values())
    drawn = [chance.choices(known, k=count) for count in (1, 2, 5, 12, 40)]
    # Texts of several words, whose letters are in bytes where there is a fallback.
    drawn += [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS[9:15]]
    prompts = ["Hello", "The ring", "環", "a </s> b", "Hello ", "Größe"]
    found = {
        "class": type(tokenizer).__name__,
        "texts": [
            {
                "text": text,
                "tokens": tokenizer(text).input_ids,
                "bare": tokenizer(text, add_special_tokens=False).input_ids,
            }
            for text in TEXTS
        ],
        "decoded": [
            {"tokens": tokens, "text": tokenizer.decode(tokens, skip_special_tokens=True)}
            for tokens in drawn
            if tokens
        ],
        "continued": [
            {"prompt": prompt, "tokens": tokens, "text": continued(tokenizer, prompt, tokens)}
            for prompt in prompts
            for tokens in drawn[:6]
            if tokens
        ],
        "eos_token_id": tokenizer.eos_token_id,
    }
    if tokenizer.chat_template:
        options = {"tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(CHAT, **options)
        tokens = tokenizer.apply_chat_template(CHAT, **options | {"tokenize": True})
        found["chat"] = {"messages": CHAT, "text": text, "tokens": tokens["input_ids"]}
    return found


def continued(tokenizer: Any, prompt: str, tokens: list[int]) -> str:
    """Text that tokens add to that of a prompt, as in the library's pipeline."""
    before = tokenizer(prompt).input_ids
    text = tokenizer.decode(before, skip_special_tokens=True)
    return tokenizer.decode(before + tokens, skip_special_tokens=True)[len(text) :]


def main() -> None:
    for name, tokenizer, files in folders():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        for file, values in files.items():
            (folder / file).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        expected = answers(AutoTokenizer.from_pretrained(folder))
        # Some classes make a tokenizer of their own of the file's vocabulary.
        as_written = answers(PreTrainedTokenizerFast.from_pretrained(folder))
        if {**expected, "class": ""} != {**as_written, "class": ""}:
            expected["as_written"] = as_written
        lines = json.dumps(expected, ensure_ascii=True, separators=(",", ":"))
        (folder / "expected.json").write_text(lines.replace("},{", "},\n{") + "\n")


if __name__ == "__main__":
    main()
