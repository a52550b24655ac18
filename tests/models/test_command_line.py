"""`python -m models generate`, and bad input to it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.command_line import main
from models.generation import Generator
from models.generation.generator import make_mesh
from models.generation.text import answer
from models.hugging_face import ModelFolder, load
from models.hugging_face.tokenizer import encode_prompt, encode_rendered
from tests.models.hugging_face.folders import DATA
from tests.models.hugging_face.test_tokenizers import DATA as TOKENIZERS
from train.data.tokenizer import read_tokenizer


@pytest.fixture
def commands():
    """`python -m models` in this process, whose devices are there already."""
    return main


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    return ModelFolder(DATA / "llama3")


def test_one_answer_is_printed_as_it_comes_and_several_when_they_are_there(
    commands, capsys, folder
):
    options = ["--dtype", "float32", "--max-new-tokens", "6", "--devices.tensor", "2"]
    commands(["generate", str(folder.path), "--prompt", "Hello", *options])
    one = capsys.readouterr().out
    prompts = ["--prompt", "Hello", "World!", "--prompt", "Hello"]
    commands(["generate", str(folder.path), *prompts, *options])
    several = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert len(several) == 3 and several[2] == several[0]
    assert several[0] == f"Hello{one.removesuffix(chr(10))}"
    assert several[1].startswith("World!")
    commands(
        ["generate", str(folder.path), "--prompt", "Hello", *options, "--devices.context", "2"]
    )
    assert capsys.readouterr().out == one
    tokenizer = folder.tokenizer()
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    (tokens,) = made(
        params,
        [encode_prompt(tokenizer, "Hello")],
        max_new_tokens=6,
        stop_tokens=folder.stop_tokens,
    )
    assert one == tokenizer.decode(tokens) + "\n"


def test_a_stream_is_the_text_of_all_tokens(folder):
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params, output = load(folder, made.abstract_params), io.StringIO()
    (text,) = answer(made, params, folder, ["Grüße"], output, max_new_tokens=8)
    assert output.getvalue() == text + "\n"


def test_beginning_of_text_is_not_doubled(folder):
    tokenizer = folder.tokenizer()
    letters = np.frombuffer(b"Hi", np.uint8)
    assert len(encode_prompt(tokenizer, "Hi")) == 1 + len(letters)
    assert encode_prompt(tokenizer, "<|begin_of_text|>Hi") == encode_prompt(tokenizer, "Hi")
    assert encode_prompt(tokenizer, "Hi")[0] == 256


def test_a_chat_is_written_by_the_template(folder):
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    text = "<|begin_of_text|><|start|>user\nHi<|end|><|start|>assistant\n"
    chat = answer(made, params, folder, ["Hi"], chat=True, max_new_tokens=5)
    assert chat == answer(made, params, folder, [text], max_new_tokens=5)


class _Recorder:
    """In the place of a generator: answers with these tokens, and keeps what it is given."""

    def __init__(self, answer: list[int]):
        self.answer = answer

    def __call__(self, params, prompts, *, stop_tokens, on_token, **options):
        self.prompts, self.stop_tokens = prompts, stop_tokens
        for number in range(len(prompts)):
            for token in self.answer:
                on_token(number, token)


def recorder(answer: list[int]) -> Any:
    return _Recorder(answer)


def changed_tokenizer(folder: ModelFolder, path: Path) -> ModelFolder:
    """The folder with a tokenizer that cuts, pads, and ends each text with a token."""
    from tokenizers import processors

    shutil.copytree(folder.path, path)
    tokenizer = folder.tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=300)
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, 256), (end, 257)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return ModelFolder(path)


def rendered_tokens(tokenizer, text: str) -> list[int]:
    (encoding,) = encode_rendered(tokenizer, [text])
    return encoding.ids


def test_a_prompt_is_neither_cut_nor_padded(folder, tmp_path):
    changed, made = changed_tokenizer(folder, tmp_path / "model"), recorder([])
    answer(made, {}, changed, ["Hello, world"])
    assert made.prompts == [[256, *rendered_tokens(folder.tokenizer(), "Hello, world"), 257]]


def test_a_rendered_chat_gets_no_special_tokens_of_the_tokenizer(folder, tmp_path):
    changed, made = changed_tokenizer(folder, tmp_path / "model"), recorder([])
    answer(made, {}, changed, ["Hi"], chat=True)
    text = "<|begin_of_text|><|start|>user\nHi<|end|><|start|>assistant\n"
    assert made.prompts == [rendered_tokens(folder.tokenizer(), text)]
    assert made.prompts[0][-1] != 257


def test_an_answer_ends_as_the_tokenizer_says_where_the_model_does_not(folder, tmp_path):
    made, path = recorder([]), tmp_path / "model"
    shutil.copytree(folder.path, path)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text()) | {"eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    answer(made, {}, ModelFolder(path), ["Hi"])
    assert made.stop_tokens == (259,)


def test_words_of_sentence_piece_keep_their_space_and_bytes_are_printed_once(
    folder, tmp_path, monkeypatch
):
    tokenizer = read_tokenizer(str(TOKENIZERS / "llama2" / "tokenizer.json"))
    monkeypatch.setattr(ModelFolder, "tokenizer", lambda self: tokenizer)
    ring = rendered_tokens(tokenizer, "ring")
    made = recorder([*ring, tokenizer.token_to_id("<0xC3>"), *ring])
    output = io.StringIO()
    answer(made, {}, folder, ["The"], output)
    assert output.getvalue() == " ring\ufffd ring\n"
    several = io.StringIO()
    answer(made, {}, folder, ["The", "A"], several)
    assert several.getvalue() == "The ring\ufffd ring\n\nA ring\ufffd ring\n\n"
    # A message of a chat begins anew.
    assert answer(made, {}, folder, ["The"], chat=True) == ["ring\ufffd ring"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "prompt: expected at least one; give --prompt TEXT, or several"),
        (["--prompt", "x" * 200], "prompts: number 0 has 201 tokens, and the model's context is"),
        (["--prompt", "x", "--top-p", "2"], "top_p=2.0: expected more than 0 and at most 1"),
        (["--prompt", "x", "--devices.tensor", "3"], "num_heads=4 is not divisible by a tensor"),
        (["--prompt", "x", "--devices.context", "0"], "devices.context=0: expected 1 to 8, as"),
        (
            ["--prompt", "x", "--devices.context", "5", "--devices.tensor", "2"],
            "devices.context=5: expected 1 to 4, as the number of devices here is 8, and"
            " devices.tensor=2; on a CPU, --devices.cpu-devices 10 simulates 10",
        ),
        (
            ["--prompt", "x", "--devices.tensor", "99"],
            "devices.tensor=99: expected at most 8, the number of devices here, or 0; on a CPU,"
            " --devices.cpu-devices 99 simulates 99",
        ),
        (["--prompt", "x", "--devices.tensor", "-1"], "the number of devices here, or 0"),
        (["--prompt", "x", "--implementation", "rings"], "rings"),
        (
            ["--prompt", "x", "--implementation", "fused", "--devices.tensor", "2"],
            "implementation='fused': fused is not possible: these kernels run on Hopper GPUs only;"
            " in all_gather_matmul; give --implementation fused,xla to use the first that can, or"
            " leave it out",
        ),
    ],
)
def test_bad_input_is_a_sentence(commands, capsys, folder, arguments, sentence):
    with pytest.raises(SystemExit):
        commands(["generate", str(folder.path), *arguments])
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ") and sentence in error


def test_an_answer_that_ends_with_the_context_says_so(commands, caplog, capsys, folder):
    for tokens, is_cut in (("5", False), ("400", True)):
        caplog.clear()
        commands(["generate", str(folder.path), "--prompt", "x" * 120, "--max-new-tokens", tokens])
        ends = "max_new_tokens=400: 1 of 1 answers end before, with the model's context of 128"
        assert (ends in caplog.text) == is_cut
    capsys.readouterr()


@pytest.mark.parametrize(
    ("lora", "generate"),
    [
        ({}, "answer with `python -m models generate FOLDER`"),
        ({"lora": {"rank": 4}}, "`python -m models generate 'my base' --adapter FOLDER`"),
    ],
)
def test_a_checkpoint_in_place_of_a_folder_is_answered_with_the_commands_to_give(
    commands, capsys, tmp_path, lora, generate
):
    run = tmp_path / "a run"
    for name in ("state", "data_position", "configuration"):
        (run / "step_2" / name).mkdir(parents=True)
    (run / "step_2" / "_CHECKPOINT_METADATA").touch()
    values = {"model": {}, "init_from": "my base", **lora}
    (run / "step_2" / "configuration" / "metadata").write_text(json.dumps(values))
    for source in (run, run / "step_2"):
        with pytest.raises(SystemExit):
            commands(["generate", str(source), "--prompt", "Hello"])
        error = " ".join(capsys.readouterr().err.split())
        assert f"with `python -m models export '{source}' FOLDER`" in error
        assert generate in error


@pytest.mark.parametrize("command", ["generate --prompt x", "import OUT", "export OUT"])
def test_a_path_without_a_folder_is_a_sentence(commands, capsys, tmp_path, command):
    (tmp_path / "file").touch()
    for name, sentence in (
        ("file", "is a file; give its folder"),
        ("gone", "does not exist; give"),
    ):
        path, (kind, *rest) = tmp_path / name, command.replace("OUT", str(tmp_path / "out")).split()
        with pytest.raises(SystemExit):
            commands([kind, str(path), *rest])
        assert f"error: '{path}': {sentence}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("adapter", [[], ["--adapter", "formal"]], ids=["", "adapter"])
def test_a_folder_in_place_of_a_checkpoint_is_answered_with_the_commands_to_give(
    commands, capsys, tmp_path, folder, adapter
):
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit):
        commands(["export", str(folder.path), out, *adapter])
    error = " ".join(capsys.readouterr().err.split())
    assert f"checkpoint='{folder.path}': a Hugging Face folder, and not a checkpoint" in error
    assert f"`python -m models import {folder.path} CHECKPOINT`" in error
    assert f"`{' '.join(['python -m models export CHECKPOINT', out, *adapter])}`" in error
