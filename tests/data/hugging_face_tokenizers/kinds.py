"""Small tokenizers of the kinds that published models have."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

#: What the vocabularies are trained on.
SENTENCES = [
    "The ring turns and the chunk that has arrived is multiplied while the next one travels.",
    "Each device holds a shard of the weights, and gathers what the other devices hold.",
    "A gradient is a sum over devices; the sum is scattered, so each keeps its own part.",
    "Der Ring dreht sich, während die Geräte rechnen. Größe, Übung, Straße.",
    "L'anneau tourne, l'élève écoute, et le café est déjà servi.",
    "環は回り、行列は掛けられる。重みは分けられる。",
    "def gather(x, axis):\n    return [x[i] for i in range(axis)]\n",
    "In 2023 there were 1234567 tokens, and 89% of them were words like don't and I'll.",
]
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
MISTRAL_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


# Byte-level BPE


def byte_level(
    regex: str | None,
    specials: list[str],
    *,
    normalizer: Any = None,
    ordinary: tuple[str, ...] = (),
    add_prefix_space: bool = False,
    ignore_merges: bool = False,
) -> Tokenizer:
    """A tokenizer of bytes; `regex` splits texts, None as GPT-2's does. `ordinary` are tokens that
    are not special, as they may be in a vocabulary by chance."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=regex is None)
    if regex is not None:
        parts = [pre_tokenizers.Split(Regex(regex), behavior="isolated"), split]
        split = pre_tokenizers.Sequence(parts)
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {name: len(vocabulary) + i for i, name in enumerate(ordinary)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([special(name) for name in specials])
    return tokenizer


def with_beginning(tokenizer: Tokenizer, name: str, *first: Any) -> Tokenizer:
    """Makes a tokenizer put a token before each text."""
    number = tokenizer.token_to_id(name)
    template = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name}:1 $B:1", special_tokens=[(name, number)]
    )
    tokenizer.post_processor = processors.Sequence([*first, template]) if first else template
    return tokenizer


# BPE and unigrams as SentencePiece has them

CONTROLS = ["<unk>", "<s>", "</s>"]


def sentence_piece(*, byte_fallback: bool, scheme: str, extra: tuple[str, ...] = ()) -> Tokenizer:
    """BPE over words that begin with a low line.

    `scheme` says where one is added: "normalizer" after each special token, by a normalizer, as in
    older files; else as Metaspace takes it.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=230, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    spaces = ["\u2581" * 2, "\u2581" * 4]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    names = dict.fromkeys([*CONTROLS, *extra, *in_bytes, *pieces, *spaces])
    merges = [tuple(pair) for pair in model["merges"]]
    merges += [("\u2581", "\u2581"), ("\u2581" * 2, "\u2581" * 2)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: number for number, name in enumerate(names)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens([special(name) for name in (*CONTROLS, *extra)])
    return with_beginning(tokenizer, "<s>")


def unigram(*, byte_fallback: bool) -> Tokenizer:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=CONTROLS, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(SENTENCES, trainer)
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.ByteFallback(), decoders.Metaspace()] if byte_fallback else []
    tokenizer.decoder = decoders.Sequence(steps) if steps else decoders.Metaspace()
    tokenizer.add_special_tokens([special(name) for name in CONTROLS])
    return with_beginning(tokenizer, "<s>")


def words() -> Tokenizer:
    names = ["[UNK]", "[EOS]", *sorted({word for s in SENTENCES for word in s.split()})]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([special("[UNK]"), special("[EOS]")])
    return tokenizer
