"""Conversations as tokens: an answer follows the tokens of its prompt, and all of it is learnt."""

from __future__ import annotations

import itertools
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from models.hugging_face.chat.tokens import ChatTokens
from tests.models.hugging_face.chat.chat_folders import with_template

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
#: Words that begin a line, and words after one and two spaces, so that tokens have them together.
TEXTS = [
    "the answer is yes and no", "user assistant: yes no maybe",
    "Yes answer  two  spaces\n\nand lines\n", "ASSISTANT: answer USER: question",
] * 20  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spoken(before: str, after: str = "</s>") -> str:
    """A template with these texts before and after an answer."""
    return (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}"
        f"{before}{{{{ m.content }}}}{after}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{{% endif %}}"
    )


#: Templates, with what ends an answer.
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "space": (spoken("ASSISTANT: "), "</s>"),
    "two spaces": (spoken("ASSISTANT:  "), "</s>"),
    "tab": (spoken("ASSISTANT:\t", "\n"), "\n"),
    "word": (spoken("assistant is", "\n"), "\n"),
    "nothing": (spoken(""), "</s>"),
}
ANSWERS = ["answer", "Yes, the answer", " lead", "\nline", "\n\nx", "ü😀 é", "  two", "'s", "1 2"]
_QWEN = (
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(prefix: bool, trim: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    return tokenizer


def sentencepiece(scheme: str) -> Tokenizer:
    """With byte fallback; a normalizer or Metaspace puts the word boundary before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


KINDS = {
    "byte-level": lambda: byte_level(False, False),
    "byte-level trimmed": lambda: byte_level(False, True),
    "byte-level prefix": lambda: byte_level(True, True),
    "qwen": qwen,
    "sentencepiece legacy": lambda: sentencepiece("normalizer"),
    "sentencepiece first": lambda: sentencepiece("first"),
    "sentencepiece never": lambda: sentencepiece("never"),
    "unigram": unigram,
}


@cache
def trained(kind: str) -> Tokenizer:
    tokenizer, alphabet, fallback = KINDS[kind](), pre_tokenizers.ByteLevel.alphabet(), []
    if "sentencepiece" in kind:
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
        first_space = [] if "never" in kind else [decoders.Strip(" ", 1, 0)]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first_space]
        tokenizer.decoder = decoders.Sequence(steps)
    elif kind == "unigram":
        letters = sorted(set("".join([*TEXTS, *ANSWERS, "USER:\t"])))
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=letters,
            show_progress=False,
        )  # fmt: skip
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.train_from_iterator(TEXTS, trainer)
        return tokenizer
    else:
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIAL, *fallback], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    # The tokens of bytes are no special ones.
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(values))


def learnt(example: Any, tokenizer: Tokenizer) -> list[str]:
    """The texts of the runs of tokens to learn."""
    pairs = zip(example.tokens, example.answers, strict=True)
    runs = [(a, [t for t, _ in run]) for a, run in itertools.groupby(pairs, lambda pair: pair[1])]
    return [tokenizer.decode(run, skip_special_tokens=False) for a, run in runs if a]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_answer_is_learnt_whole_after_the_tokens_of_its_prompt(tmp_path, kind, template):
    text, end = TEMPLATES[template]
    tokenizer = trained(kind)
    chats = ChatTokens(with_template(tmp_path, text), tokenizer)
    for answer in ANSWERS:
        reply = {"role": "assistant", "content": answer}
        first, second = {"role": "user", "content": "question"}, {"role": "user", "content": "no"}
        examples = chats.examples([first, reply, second, reply])
        # A decoder drops a space, or the mark of one, at the beginning.
        found = [text.strip(" ") for example in examples for text in learnt(example, tokenizer)]
        assert found == [(answer + end).strip(" ")] * 2
        for prompt in (chats.prompt([first]), chats.prompt([first, reply, second])):
            assert any(
                example.tokens[: len(prompt)] == prompt and example.answers[len(prompt)]
                for example in examples
            )
        # What is learnt from follows nothing but its prompt: no other token has been changed.
        whole = tokenizer.decode(examples[-1].tokens, skip_special_tokens=False)
        rendered = chats._template.render([first, reply, second, reply])
        again = tokenizer.encode(rendered, add_special_tokens=False).ids
        assert whole == tokenizer.decode(again, skip_special_tokens=False)


def test_a_prompt_that_ends_in_a_space_keeps_its_token(tmp_path):
    """Whole, the text has one token for the space and the word; after the prompt there are two."""
    tokenizer = trained("byte-level")
    chats = ChatTokens(with_template(tmp_path, spoken("ASSISTANT: ")), tokenizer)
    user = {"role": "user", "content": "question"}
    (example,) = chats.examples([user, {"role": "assistant", "content": "answer"}])
    whole = tokenizer.encode("USER: question ASSISTANT: answer</s>", add_special_tokens=False)
    assert "Ġanswer" in whole.tokens
    assert learnt(example, tokenizer) == ["answer</s>"]
    before = example.tokens[example.answers.index(1) - 1]
    assert tokenizer.id_to_token(before) == "Ġ"


def test_a_template_that_rewrites_earlier_answers_gives_a_sequence_for_each(tmp_path):
    """Models that think have such templates: a thought is written for the last answer alone."""
    text = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}",
    )
    tokenizer = trained("qwen")
    chats = ChatTokens(with_template(tmp_path, text), tokenizer)
    thoughts = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thinking": "oh"},
    ]
    examples = chats.examples(thoughts)
    assert [learnt(example, tokenizer) for example in examples] == [
        ["<think>hm</think>b<|im_end|>"],
        ["<think>oh</think>d<|im_end|>"],
    ]
    prompt = chats.prompt(thoughts[:3])
    assert examples[1].tokens[: len(prompt)] == prompt


def test_variables_choose_what_a_prompt_ends_with(tmp_path):
    text = CHATML.replace(
        "assistant\n{% endif %}", "assistant\n{% if quiet %}<think></think>{% endif %}{% endif %}"
    ).replace("{{ m.content }}", "{{ m.prefix }}{{ m.content }}")
    reply = {"role": "assistant", "content": "yes", "prefix": "<think></think>"}
    messages = [{"role": "user", "content": "a"}, reply]
    tokenizer = trained("qwen")
    folder = with_template(tmp_path, text)
    for variables, expected in (
        ({}, "<think></think>yes<|im_end|>"),
        ({"quiet": True}, "yes<|im_end|>"),
    ):
        (example,) = ChatTokens(folder, tokenizer, variables).examples(messages)
        assert learnt(example, tokenizer) == [expected]
    with pytest.raises(ValueError, match=r"ends the prompt for message 1 with .*does not begin"):
        del reply["prefix"]
        ChatTokens(folder, tokenizer, {"quiet": True}).examples(messages)


def test_truncation_padding_and_post_processors_of_the_tokenizer_do_not_count(tmp_path):
    tokenizer = Tokenizer.from_str(trained("byte-level").to_str())
    folder = with_template(tmp_path, CHATML)
    messages = [{"role": "user", "content": "word " * 50}]
    expected = ChatTokens(folder, trained("byte-level")).prompt(messages)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=512)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert ChatTokens(folder, tokenizer).prompt(messages) == expected


def test_a_tokenizer_that_fails_is_a_sentence(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    chats = ChatTokens(with_template(tmp_path, "{{ messages[0].content }}"), tokenizer)
    with pytest.raises(ValueError, match=r"the tokenizer failed for the text 'b': .*\[UNK\]"):
        chats.prompt([{"role": "user", "content": "b"}])


PIECES = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u3000", "a", "answer", "Yes", " the", ".", "!", "'s",
    "1", "ü", "e\u0301", "中", "ﬁ", "😀", "👩\u200d🚀", "<", "</s>", "<|im_end|>", "▁", "Ġ",
]  # fmt: skip


@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
    st.sampled_from(["</s>", "<|im_end|>\n", "\n", "", "  ", "</s> </s>"]),
    st.lists(st.lists(st.sampled_from(PIECES), min_size=1).map("".join), min_size=2, max_size=6),
)
def test_any_text_follows_its_prompt(kind, before, after, texts):
    tokenizer, turns = trained(kind), len(texts) // 2 * 2
    roles = itertools.cycle(["user", "assistant"])
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, texts[:turns], strict=False)
    ]
    with tempfile.TemporaryDirectory() as name:
        chats = ChatTokens(with_template(Path(name), spoken(before, after)), tokenizer)
        examples = chats.examples(messages)
        for place in range(1, turns, 2):
            prompt = chats.prompt(messages[:place])
            assert any(example.tokens[: len(prompt)] == prompt for example in examples)
        again = tokenizer.encode(chats._template.render(messages), add_special_tokens=False).ids
    last = examples[-1].tokens
    decoded = [tokenizer.decode(t, skip_special_tokens=False) for t in (last, again)]
    assert decoded[0] == decoded[1]
