"""Hugging Face tokenizers: whole documents, their ends, and invalid files."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from train.data import tokenizer as tokenizer_module
from train.data.dataset import TextData, open_dataset
from train.data.tokenizer import load_tokenizer


def open_text(data: Path | str, tokenizer: Path) -> TextData:
    return open_dataset(str(data), str(tokenizer), sequence_length=3, batch_size=4, seed=0)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the ring turns")
    return path


def train_tokenizer(path: Path, end: str | None = "<|endoftext|>", max_length: int = 0) -> Path:
    """A byte-level BPE that begins every text with <bos>, and may truncate and pad it."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = byte_level(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>"] if end is None else ["<bos>", end],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the ring turns and the ring returns " * 20], trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    if max_length:
        model.enable_truncation(max_length)
        model.enable_padding(length=64)
    model.save(str(path))
    return path


@pytest.mark.parametrize("end", ["<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>"])
def test_a_tokenizer_file_tokenizes_whole_documents(tmp_path: Path, end: str):
    """The file asks to truncate, to pad and to begin with <bos>; none of this happens."""
    path = train_tokenizer(tmp_path / "tokenizer.json", end, max_length=4)
    model = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    contents = ["the ring turns and turns", "and the ring returns: ü"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text(content, encoding="utf-8")
    text = open_text(f"{tmp_path}/*.txt", path)

    ends = np.flatnonzero(text.tokens == model.token_to_id(end))
    assert len(ends) == 2
    assert ends[-1] == text.token_count - 1
    documents = text.tokens[: ends[0]].tolist(), text.tokens[ends[0] + 1 : ends[1]].tolist()
    assert [model.decode(tokens, skip_special_tokens=False) for tokens in documents] == contents
    assert text.token_count < sum(len(content.encode()) for content in contents)
    assert text.vocabulary_size == max(model.get_vocab().values()) + 1
    assert text.tokens.dtype == np.uint16
    assert text.sha256 == hashlib.sha256("".join(contents).encode()).hexdigest()


def test_grouping_documents_for_the_tokenizer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = train_tokenizer(tmp_path / "tokenizer.json")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"ring {i}"}) + "\n" for i in range(20)))
    whole = open_text(lines, path)
    monkeypatch.setattr(tokenizer_module, "TOKENIZATION_GROUP_BYTES", 15)
    np.testing.assert_array_equal(open_text(lines, path).tokens, whole.tokens)


def test_a_missing_tokenizers_package_names_the_extra(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[hf\]'"):
        open_text(text_file, text_file)


def test_a_tokenizer_without_an_end_of_document_is_refused(text_file: Path, tmp_path: Path):
    path = train_tokenizer(tmp_path / "tokenizer.json", end=None)
    with pytest.raises(ValueError, match=r"tokenizer='.*tokenizer.json': has no end-of-document"):
        open_text(text_file, path)


def test_ordinary_text_does_not_end_documents(text_file: Path, tmp_path: Path):
    """A vocabulary may have </s> by chance, as Qwen's has."""
    path = tmp_path / "tokenizer.json"
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "ring": 1}, "ring"))
    model.save(str(path))
    with pytest.raises(ValueError, match="has no end-of-document token; name one as eos_token"):
        open_text(text_file, path)
    model.add_special_tokens(["<eos>"])
    model.save(str(path))
    assert load_tokenizer(str(path)).end_of_document == 2


END = "<|endoftext|>"


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "ring"}}, "ring"),
        ({"tokenizer_config.json": {"eos_token": {"content": "ring", "lstrip": True}}}, "ring"),
        ({"tokenizer_config.json": {"eos_token": None}}, END),
        ({"tokenizer_config.json": {"eos_token": ""}}, END),
        ({"special_tokens_map.json": {"eos_token": {"content": "ring"}}}, "ring"),
        # The second file is newer if the first lists no tokens.
        (
            {
                "tokenizer_config.json": {"eos_token": END},
                "special_tokens_map.json": {"eos_token": "ring"},
            },
            "ring",
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": {}},
                "special_tokens_map.json": {"eos_token": "ring"},
            },
            END,
        ),
        ({"config.json": {"eos_token_id": 1}}, END),
        ({"config.json": {"eos_token_id": [0, 1]}}, "<bos>"),
        ({"generation_config.json": {"eos_token_id": [0]}}, "<bos>"),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {}}, END),
        (
            {"tokenizer_config.json": {"eos_token": "ring"}, "config.json": {"eos_token_id": 0}},
            "ring",
        ),
    ],
)
def test_the_end_of_a_document_is_what_the_folder_declares(tmp_path: Path, files: dict, end: str):
    path = tmp_path / "tokenizer.json"
    model = pytest.importorskip("tokenizers").Tokenizer.from_file(str(train_tokenizer(path, END)))
    model.add_tokens(["ring"])
    model.save(str(path))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(str(path)).end_of_document == model.token_to_id(end)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (
            "tokenizer_config.json",
            '{"eos_token": "</s>"}',
            "eos_token='</s>': expected a token that",
        ),
        ("tokenizer_config.json", '{"eos_token": 2}', "eos_token=2: expected a string, or an obj"),
        ("tokenizer_config.json", '{"eos_token": {"content": 2}}', "expected a string, or an obje"),
        (
            "special_tokens_map.json",
            '{"additional_special_tokens": 3}',
            "expected a list of tokens",
        ),
        ("special_tokens_map.json", "[]", "expected a JSON object, found list"),
        ("tokenizer_config.json", "[" * 10**5, "nested too deeply"),
        (
            "config.json",
            '{"eos_token_id": "1"}',
            "eos_token_id='1': expected the number of a token",
        ),
        ("config.json", '{"eos_token_id": true}', "eos_token_id=True: expected the number"),
        ("config.json", '{"eos_token_id": -1}', "eos_token_id=-1: expected the number of a token"),
        ("generation_config.json", '{"eos_token_id": [1e9]}', "expected the number of a token"),
        ("generation_config.json", '{"eos_token_id": ', "not JSON that can be read"),
    ],
)
def test_a_folder_that_declares_no_token_is_named(tmp_path: Path, file, content, sentence):
    path = train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=r"^tokenizer='.*tokenizer.json': ") as error:
        load_tokenizer(str(path))
    assert file in str(error.value) and sentence in str(error.value)


def test_a_file_that_is_not_a_tokenizer_is_refused(text_file: Path, tmp_path: Path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"tokenizer='.*text.txt': not a Hugging Face"):
        open_text(text_file, text_file)
    with pytest.raises(ValueError, match=r"tokenizer='.*absent.json': cannot be read"):
        open_text(text_file, tmp_path / "absent.json")


@pytest.mark.parametrize("group", [1, 2**24])
def test_a_document_that_the_tokenizer_cannot_encode_is_named(
    tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch
):
    """A vocabulary of words without an unknown token fails for all others."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer_module, "TOKENIZATION_GROUP_BYTES", group)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"ring": 0, "<eos>": 1}))
    model.add_special_tokens(["<eos>"])
    model.save(str(tmp_path / "tokenizer.json"))
    for name, texts in (("a", ["ring", "", "ring"]), ("b", ["ring", "", "torus", "cube"])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    expected = r"tokenizer='.*json', document 2 of '.*b.jsonl': .* 'torus': .*; give a tokenizer"
    with pytest.raises(ValueError, match=expected):
        open_text(tmp_path / "*.jsonl", tmp_path / "tokenizer.json")
