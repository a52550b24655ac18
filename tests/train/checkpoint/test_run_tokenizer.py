"""The tokenizer of a run: an export has it, so that its model can be asked."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import command_line
from models.hugging_face import ModelFolder
from models.hugging_face.run_tokenizer import END_OF_BYTES, keep_tokenizer, origin_of_run
from models.hugging_face.tokenizer import decode, end_of_text, parse_tokenizer
from models.hugging_face.writing import ORIGIN, keep_origin
from tests.models.hugging_face.folders import DATA
from train.data.tokenizer import BYTES, load_tokenizer
from train.run.command_line import main

TINY = shlex.split(
    "--model.num-layers 1 --mesh.data 1 --mesh.tensor 1 --batch-size 2 --sequence-length 16"
    " --steps 1 --overlap xla"
)
FILE = DATA / "llama3" / "tokenizer.json"
#: Its token <|end|>, which tokenizer_config.json names.
END = 259


@pytest.fixture
def models():
    """`python -m models` in this process, whose devices are there already."""
    return command_line.main


@pytest.mark.parametrize(
    ("flags", "end"),
    [([], END_OF_BYTES), (["--tokenizer", str(FILE), "--model.vocabulary-size", "288"], END)],
    ids=["bytes", "file"],
)
def test_what_was_trained_is_exported_and_answers(flags, end, models, tmp_path, capsys):
    run, exported = str(tmp_path / "run"), tmp_path / "exported"
    main([*TINY, *flags, "--checkpoint-dir", run])
    # No other mode than other files have, of which safetensors makes one for their owner alone.
    before = os.umask(0o027)
    models(["export", run, str(exported)])
    os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in exported.iterdir()} == {0o640}
    printed = capsys.readouterr().out
    [command] = re.findall(r"^to answer prompts: python -m models (.*)$", printed, re.MULTILINE)
    load = f"transformers.AutoModelForCausalLM.from_pretrained({str(exported)!r})"
    assert printed.endswith(f"to load in PyTorch: {load}\n")
    folder = ModelFolder(exported)
    assert folder.stop_tokens == (end,)
    assert folder.tokenizer().encode("Hi", add_special_tokens=False).ids
    models([*shlex.split(command), "--max-new-tokens", "3"])
    assert capsys.readouterr().err == ""
    if flags:
        assert (exported / "tokenizer.json").read_bytes() == FILE.read_bytes()


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bytes")
    keep_tokenizer(None, directory)
    return directory / ORIGIN


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_tokenizer_of_bytes_has_the_tokens_of_the_trainer(of_bytes: Path, text: str):
    tokenizer = parse_tokenizer((of_bytes / "tokenizer.json").read_bytes(), of_bytes)
    tokens = tokenizer.encode(text).ids
    if "<|end_of_text|>" not in text:
        assert tokens == list(text.encode())
    assert decode(tokenizer, tokens) == text.replace("<|end_of_text|>", "")


def test_all_bytes_are_tokens_and_the_last_ends_a_text(of_bytes: Path):
    model = parse_tokenizer((of_bytes / "tokenizer.json").read_bytes(), of_bytes)
    assert sorted(model.get_vocab().values()) == list(range(BYTES.vocabulary_size))
    assert end_of_text(model, of_bytes) == BYTES.end_of_document == END_OF_BYTES
    assert load_tokenizer(str(of_bytes / "tokenizer.json")).end_of_document == END_OF_BYTES
    assert decode(model, [72, 105, END_OF_BYTES]) == "Hi"


def test_another_tokenizer_takes_the_place_of_the_models_own(tmp_path: Path):
    """With it, the numbers of tokens in the model's files mean others."""
    keep_origin(DATA / "qwen3", tmp_path)
    keep_tokenizer(str(DATA / "qwen3" / "tokenizer.json"), tmp_path)
    kept = tmp_path / ORIGIN
    same = {name: (kept / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    assert all((DATA / "qwen3" / name).read_bytes() == same[name] for name in same)
    other = shutil.copytree(DATA / "llama3", tmp_path / "other") / "tokenizer.json"
    other.write_text(json.dumps(json.loads(other.read_text()), indent=1))
    keep_tokenizer(str(other), tmp_path)
    assert (kept / "tokenizer.json").read_bytes() == other.read_bytes()
    for name in ("config.json", "generation_config.json"):
        values = json.loads((kept / name).read_text())
        assert (values["eos_token_id"], values.get("bos_token_id")) == (END, None)


def test_checkpoints_of_earlier_releases_have_the_tokenizer_that_they_name(tmp_path: Path, caplog):
    with origin_of_run(tmp_path, {"tokenizer": str(FILE)}) as origin:
        assert origin is not None and origin.parent != tmp_path
        assert (origin / "tokenizer.json").read_bytes() == FILE.read_bytes()
        assert (origin / "tokenizer_config.json").is_file()
    assert not any(tmp_path.iterdir())
    with origin_of_run(tmp_path, {"tokenizer": None}) as origin:
        assert origin is not None and (origin / "tokenizer.json").is_file()
    # A checkpoint that was imported names none.
    with origin_of_run(tmp_path, {"model": {}}) as origin:
        assert origin is None
    assert caplog.text == ""
    with origin_of_run(tmp_path, {"tokenizer": "gone/tokenizer.json"}) as origin:
        assert origin is None
    assert "tokenizer gone/tokenizer.json is not there any more" in caplog.text
