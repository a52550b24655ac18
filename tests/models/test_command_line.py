"""`python -m models generate`, and bad input to it."""

from __future__ import annotations

import io

import numpy as np
import pytest

from models.command_line import main
from models.generation import Generator
from models.generation.generator import make_mesh
from models.generation.text import answer
from models.hugging_face import ModelFolder, load
from models.hugging_face.tokenizer import encode_prompt
from tests.models.hugging_face.folders import DATA


@pytest.fixture
def commands(monkeypatch):
    """`python -m models` in this process, whose devices are there already."""
    monkeypatch.setattr("models.command_line._simulate", lambda devices: None)
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
    commands(["generate", str(folder.path), "--prompt", "Hello", "World!", *options])
    several = capsys.readouterr().out.split("\n\n")
    assert several[0] == f"Hello{one.removesuffix(chr(10))}"
    assert several[1].startswith("World!")
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "x" * 200], "prompts: number 0 has 201 tokens, and the model's context is"),
        (["--prompt", "x", "--top-p", "2"], "top_p=2.0: expected more than 0 and at most 1"),
        (["--prompt", "x", "--devices.tensor", "3"], "num_heads=4 is not divisible by a tensor"),
        (["--prompt", "x", "--devices.tensor", "99"], "devices.tensor=99: expected at most the 8"),
        (["--prompt", "x", "--implementation", "rings"], "rings"),
    ],
)
def test_bad_input_is_a_sentence(commands, capsys, folder, arguments, sentence):
    with pytest.raises(SystemExit):
        commands(["generate", str(folder.path), *arguments])
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ") and sentence in error
