"""Files that a run reads, in its dry run: refused if the run refuses them, in the same words."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.models.hugging_face.folders import DATA
from train.parallel.model import ModelFunctions
from train.run.command_line import main, parse
from train.run.setup import check_inputs, complete

TINY = shlex.split(
    "--mesh.data 1 --mesh.tensor 1 --batch-size 2 --sequence-length 16 --overlap xla"
)
LLAMA = DATA / "llama3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and the checkpoints of a run of one step."""
    path = tmp_path_factory.mktemp("inputs")
    (path / "short.txt").write_text("short")
    (path / "broken_link.txt").symlink_to("gone")
    (path / "other.jsonl").write_text('{"content": "text"}\n')
    (path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    main([*TINY, "--steps", "1", "--checkpoint-dir", str(path / "run")])
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*TINY, *arguments])
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--data gone.txt", "data='gone.txt': no file matches"),
        ("--data {folder}", "this is a directory"),
        ("--data {folder}/short.txt", "one sequence needs 17 tokens"),
        ("--data {folder}/*.txt", "broken_link.txt': cannot be read"),
        ("--data {folder}/other.jsonl", 'expected a JSON object with a "text" string'),
        ("--eval-data gone.txt", "eval_data: data='gone.txt': no file matches"),
        ("--tokenizer gone.json", "tokenizer='gone.json': cannot be read"),
        ("--tokenizer {folder}/short.txt", "not a Hugging Face tokenizer"),
        ("--tokenizer {llama}/tokenizer.json", "model.vocabulary_size=256: expected at least the"
         " 260 tokens of tokenizer='{llama}/tokenizer.json'; give --model.vocabulary-size 260 or"),
        ("--tokenizer {llama}/tokenizer.json --init-from {folder}/run",
         "expected at least the 260 tokens of tokenizer='{llama}/tokenizer.json'; give --tokenizer"
         " FILE with the tokenizer of these weights"),
        ("--model.vocabulary-size 128", "expected at least 256, since without tokenizer"),
        ("--chat --data {folder}/chat.jsonl --init-from {llama}", "has no answer"),
        ("--init-from {folder}/run --model.features 64", "a checkpoint from another model"),
        ("--resume --checkpoint-dir {folder}/run --model.features 64", "from another model"),
        ("--resume --checkpoint-dir {folder}/run --seed 7", "seed was 0, is 7"),
        ("--resume --checkpoint-dir {folder}/run --lora.rank 4", "resume without --lora.rank"),
        ("--resume-step 3 --checkpoint-dir {folder}/run", "resume_step=3: not among"),
        ("--resume --checkpoint-dir {folder}/nothing", "holds no checkpoint"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_run_refuses_in_its_words(flags, sentence, folder, capsys):
    arguments = shlex.split(flags.format(folder=folder, llama=LLAMA))
    message = refused(capsys, *arguments, "--dry-run")
    assert sentence.format(folder=folder, llama=LLAMA) in message
    assert not (folder / "nothing").exists()
    assert message == refused(capsys, *arguments)


def checked(*arguments: str) -> None:
    """Checks the files of a run as its dry run does."""
    config, sizes, _ = complete(parse([*TINY, *arguments]))
    check_inputs(config, ModelFunctions(config, sizes))


def test_a_dry_run_reads_the_beginning_of_a_text_and_opens_the_rest(tmp_path):
    lines = [json.dumps({"text": "a" * 2**19})] * 3
    (tmp_path / "1.jsonl").write_text("\n".join([*lines, "{"]))
    (tmp_path / "2.jsonl").write_text("{")
    (tmp_path / "3.txt").write_bytes(b"a" * 2**20 + b"\n\xff")
    (tmp_path / "4.txt").write_text("a")
    checked("--data", str(tmp_path / "*"))
    checked("--data", str(tmp_path / "3.txt"), "--sequence-length", str(2**21))
    (tmp_path / "5.txt").symlink_to("gone")
    with pytest.raises(ValueError, match=r"5\.txt': cannot be read"):
        checked("--data", str(tmp_path / "*"))


def test_a_dry_run_without_data_may_be_of_sequences_longer_than_any_text_here():
    checked("--sequence-length", "1000000", "--chat")
    tokenizer = ["--tokenizer", str(LLAMA / "tokenizer.json"), "--model.vocabulary-size", "512"]
    checked("--sequence-length", "1000000", *tokenizer)


def test_a_dry_run_beside_a_run_takes_the_weights_and_the_steps_of_its_checkpoint(folder):
    checked("--init-from", str(folder / "run"))
    checked("--resume", "--checkpoint-dir", str(folder / "run"))
