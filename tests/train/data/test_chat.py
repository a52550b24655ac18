"""Conversations: which tokens count for the loss, how they are packed, and learning from them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.families import PRESETS
from models.generation.text import answer
from tests.models.hugging_face.chat.chat_folders import with_template
from tests.models.hugging_face.folders import DATA
from train.config.config import Config
from train.data.chat import read_chats
from train.data.dataset import open_dataset
from train.data.tokenizer import read_tokenizer
from train.log.log_file import read_log
from train.parallel import loss as step_loss
from train.run.command_line import main
from train.run.setup import open_held_out

TOKENIZER = str(DATA / "llama3" / "tokenizer.json")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "Nö."},
]
RUN = shlex.split(
    "--chat --overlap xla --model.vocabulary-size 260 --model.num-layers 1 --compute-dtype float32"
    f" --tokenizer {TOKENIZER} --log-interval 1"
)


def lines(path: Path, *conversations: Any) -> str:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations))
    return str(path)


def question(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def test_answers_count_with_the_token_that_ends_them_and_nothing_else(tmp_path):
    stream = read_chats([lines(tmp_path / "a.jsonl", CHAT)], TOKENIZER, 200)
    model = read_tokenizer(TOKENIZER)
    learnt = [int(t) for t, a in zip(stream.tokens, stream.answers, strict=True) if a]
    assert model.decode(learnt, skip_special_tokens=False) == "Yes<|end|>Nö.<|end|>"
    text = model.decode(stream.tokens[:120].tolist(), skip_special_tokens=False)
    # The template begins the text, and nothing else does.
    assert text.startswith("<|begin_of_text|><|start|>system\nBe brief.<|end|><|start|>user\nHi<")
    assert text.count("<|begin_of_text|>") == 1


def test_the_beginning_ends_with_the_line_that_has_the_last_byte(tmp_path):
    path = tmp_path / "a.jsonl"
    first = Path(lines(path, CHAT)).read_text()
    path.write_text(f"{first}{first}no JSON")
    whole = read_chats([lines(tmp_path / "b.jsonl", CHAT, CHAT)], TOKENIZER, 200)
    beginning = read_chats([str(path)], TOKENIZER, 200, most_bytes=len(first.encode()) + 1)
    assert beginning.sha256 == whole.sha256
    np.testing.assert_array_equal(beginning.tokens, whole.tokens)
    with pytest.raises(ValueError, match="line 3: expected JSON"):
        read_chats([str(path)], TOKENIZER, 200, most_bytes=2**20)


def test_conversations_are_not_cut_where_they_fit_into_the_next_sequence(tmp_path):
    chats = [question("a" * n, "b" * 3) for n in (4, 9, 2, 60)]
    data = open_dataset(
        lines(tmp_path / "a.jsonl", *chats),
        TOKENIZER,
        sequence_length=64,
        batch_size=1,
        seed=0,
        chat=True,
    )
    lengths = [len("\nuser\nassistant") + 5 + n + 3 for n in (4, 9, 2, 60)]
    batch = data.sequences(range(data.sequences_per_epoch))
    kept = [[int(n) for n in row if n] for row in batch["document_lengths"]]
    assert [sum(row) for row in kept] == [64, 64, 64]
    assert kept[0] == [lengths[0], lengths[1], 64 - lengths[0] - lengths[1]]
    assert kept[1] == [lengths[2], 64 - lengths[2]]
    # The last is longer than a sequence: its answer is cut off.
    assert kept[2] == [64]
    assert batch["answers"].sum(axis=1).tolist() == [8, 4, 0]
    assert "1 conversations cut to sequence_length=64" in data.description


def test_the_token_after_white_space_that_ends_an_answer_is_not_of_it(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    template = (
        "{% for message in messages %}<|start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>"
        "{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}\n\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    data = lines(tmp_path / "a.jsonl", CHAT)
    stream = read_chats([data], str(folder / "tokenizer.json"), 200)
    learnt = [int(t) for t, a in zip(stream.tokens, stream.answers, strict=True) if a]
    decoded = read_tokenizer(TOKENIZER).decode(learnt, skip_special_tokens=False)
    assert decoded == "Yes<|end|>Nö.<|end|>"


SPACE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_folder(path: Path, template: str, **settings: Any) -> str:
    """A tokenizer.json in a folder with this template, whose tokens join spaces with words."""
    values = json.loads(Path(TOKENIZER).read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    # In the place of a byte that no text has.
    vocabulary["ĠY"] = vocabulary.pop("ÿ")
    values["model"]["merges"] = [["Ġ", "Y"]]
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    with_template(path, template, **settings)
    return str(path / "tokenizer.json")


def learnt_text(stream: Any, tokenizer: str) -> str:
    tokens = [int(t) for t, a in zip(stream.tokens, stream.answers, strict=True) if a]
    return read_tokenizer(tokenizer).decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("template", [SPACE, SPACE.replace(": ", "\n"), SPACE.replace(": ", ":")])
def test_generation_asks_with_the_tokens_that_training_has_before_an_answer(tmp_path, template):
    tokenizer = chat_folder(tmp_path / "model", template)
    asked: list[list[int]] = []

    class Folder:
        path = tmp_path / "model"
        stop_tokens = (259,)

        def tokenizer(self) -> Any:
            return read_tokenizer(tokenizer)

    def generator(params: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        asked.extend(prompts)
        return [[1] for _ in prompts]

    made: Any = generator
    folder: Any = Folder()
    answer(made, {}, folder, ["Grüße"], chat=True)
    chats = [question("Grüße", "Yes, you."), question("Grüße", "No")]
    stream = read_chats([lines(tmp_path / "a.jsonl", *chats)], tokenizer, 200)
    for start in stream.starts[:2]:
        tokens = stream.tokens[start : start + len(asked[0])].tolist()
        assert tokens == asked[0]
        assert stream.answers[start : start + len(asked[0]) + 1].tolist() == [0] * len(tokens) + [1]
    assert learnt_text(stream, tokenizer) == "Yes, you.<|end|>No<|end|>"


def test_answers_that_a_template_rewrites_are_learnt_from_sequences_of_their_own(tmp_path):
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    tokenizer = chat_folder(tmp_path / "model", template)
    data = open_dataset(
        lines(tmp_path / "a.jsonl", CHAT),
        tokenizer,
        sequence_length=100,
        batch_size=1,
        seed=0,
        chat=True,
    )
    assert learnt_text(data, tokenizer) == "<think></think>Yes<|end|><think></think>Nö.<|end|>"
    assert "1 conversations divided, as the template rewrites earlier" in data.description


def test_a_line_gives_the_template_tools_documents_and_variables(tmp_path):
    template = (
        "{{ bos_token }}{{ tools | tojson }}{{ documents | tojson }}{{ tone }}{{ more }}"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content or m.tool_calls }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    tokenizer = chat_folder(tmp_path / "model", template, bos_token="<|begin_of_text|>")
    chat = [
        {"role": "user", "content": "Sum?"},
        {"role": "assistant", "content": None, "tool_calls": ["sum"]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three"},
    ]
    line = {"messages": chat, "tools": [{"name": "sum"}], "documents": [{"title": "T"}]}
    line["chat_template_kwargs"] = {"tone": "kind"}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    stream = read_chats([str(tmp_path / "a.jsonl")], tokenizer, 250, {"tone": "dry", "more": 1})
    text = read_tokenizer(tokenizer).decode(stream.tokens.tolist(), skip_special_tokens=False)
    begin = '<|begin_of_text|>[{"name": "sum"}][{"title": "T"}]kind1<|start|>user\nSum?<|end|>'
    assert text.startswith(begin)
    assert learnt_text(stream, tokenizer) == "['sum']<|end|>Three<|end|>"


def test_variables_of_a_run_reach_the_template(tmp_path):
    tokenizer = chat_folder(tmp_path / "model", SPACE.replace("{% for", "{{ tone }}{% for", 1))
    config = Config(
        model=dataclasses.replace(PRESETS["llama3-8b"](), vocabulary_size=260),
        eval_data=lines(tmp_path / "a.jsonl", CHAT),
        tokenizer=tokenizer,
        chat=True,
        chat_template_kwargs='{"tone": "dry"}',
        sequence_length=100,
    )
    text = open_held_out(config)
    assert text is not None
    read = read_tokenizer(tokenizer).decode(text.tokens.tolist())
    assert read.startswith("drysystem: Be brief.")


@pytest.fixture(scope="module")
def format_data(tmp_path_factory) -> str:
    """200 questions of one of four letters, each answered in the same form."""
    rng = np.random.default_rng(0)
    letters = [chr(97 + n) for n in rng.integers(0, 4, 200)]
    chats = [question(letter, f"<{letter.upper()}>") for letter in letters]
    return lines(tmp_path_factory.mktemp("format") / "chats.jsonl", *chats)


def losses(log: Path, event: str = "step") -> list[float]:
    return [record["loss"] for record in read_log(str(log)) if record["event"] == event]


def test_a_model_learns_a_format_and_is_evaluated_on_its_answers(tmp_path, format_data, capsys):
    training = shlex.split(
        "--mesh.tensor 2 --mesh.data 2 --batch-size 8 --sequence-length 32 --steps 120"
        " --optimizer.learning-rate 0.01 --optimizer.warmup-steps 10"
    )
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--save-interval", "120"]
    log = tmp_path / "log.jsonl"
    main([*RUN, *training, "--data", format_data, *saved, "--log-file", str(log)])
    curve = losses(log)
    assert curve[0] > 5 and np.mean(curve[-10:]) < 0.2
    found = []
    for tensor in (1, 4):
        mesh = ["--mesh.tensor", str(tensor), "--mesh.data", "2", "--batch-size", "8"]
        log = tmp_path / f"eval-{tensor}.jsonl"
        evaluated = ["--eval-only", "--eval-data", format_data, "--checkpoint-dir", saved[1]]
        main([*RUN, *mesh, "--sequence-length", "32", *evaluated, "--log-file", str(log)])
        found += losses(log, "evaluation")
        output = " ".join(capsys.readouterr().out.split())
        assert f"weights from {saved[1]}/step_120" in output and "perplexity" in output
        # Four letters and the end of each of 200 answers.
        assert "800 tokens" in output
    # A loss this small is a difference of numbers of order one.
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0] < 0.3
    assert sorted(path.name for path in (tmp_path / "saved").glob("step_*")) == ["step_120"]


@pytest.mark.exhaustive
def test_adapters_learn_a_format_and_a_resume_is_exact(tmp_path, format_data, capsys):
    # The weights have learnt another format of the same letters.
    others = [question(chr(97 + n), f">{chr(65 + n)}<") for n in range(4)] * 50
    base, run, whole, resumed = (tmp_path / name for name in ("base", "run", "whole", "resumed"))
    flags = shlex.split(
        "--mesh.tensor 2 --mesh.data 2 --batch-size 8 --sequence-length 32 --steps 60"
        " --optimizer.learning-rate 0.01 --optimizer.warmup-steps 5"
    )
    data = lines(tmp_path / "others.jsonl", *others)
    main([*RUN, *flags, "--data", data, "--checkpoint-dir", str(base)])
    arguments = [*RUN, *flags, "--data", format_data, "--init-from", str(base)]
    arguments += ["--lora.rank", "8", "--lora.dropout", "0.05", "--checkpoint-dir", str(run)]
    main([*arguments, "--save-interval", "40", "--log-file", str(whole)])
    curve = losses(whole)
    go_on = re.findall(r"to go on: .*", capsys.readouterr().out)[-1]
    assert f"--init-from {base}" in go_on
    # Four numbers of an answer, of which the letter may still be any of four.
    assert curve[0] > 2 and np.mean(curve[-10:]) < np.log(4) / 4 + 0.05
    main([*arguments, "--resume-step", "40", "--log-file", str(resumed)])
    assert losses(resumed) == curve[40:]


def first_losses(folder: Path, *flags: str) -> list[float]:
    """Losses of two steps with answers whose lengths differ."""
    chats = [question("q" * n, "answer " * (1 + n % 5)) for n in range(16)]
    data = lines(folder / "a.jsonl", *chats)
    shape = ["--batch-size", "8", "--sequence-length", "64", "--steps", "2"]
    log = folder / "log"
    main([*RUN, *shape, "--data", data, *flags, "--log-file", str(log)])
    return losses(log)


@pytest.fixture(scope="module")
def losses_of_one_device(tmp_path_factory) -> list[float]:
    flags = ["--mesh.data", "1", "--mesh.tensor", "1"]
    return first_losses(tmp_path_factory.mktemp("one"), *flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--mesh.fsdp 2 --mesh.tensor 2 --mesh.data 1 --zero 3 --gradient-accumulation-steps 2",
        pytest.param("--mesh.data 4 --mesh.tensor 1", marks=pytest.mark.exhaustive),
        pytest.param(
            "--mesh.data 1 --mesh.tensor 4 --gradient-accumulation-steps 4",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_loss_is_the_mean_over_all_answers(tmp_path, losses_of_one_device, flags):
    """Devices and microbatches have different numbers of them."""
    found = first_losses(tmp_path, *flags.split())
    np.testing.assert_allclose(found, losses_of_one_device, rtol=2e-5)


def test_a_masked_token_does_not_count(monkeypatch):
    """Neither its loss nor a gradient: targets that do not count may be anything."""
    seen = {}

    class Merged:
        def loss_and_statistics(self, inputs, targets, documents, state, dropout_key):
            return targets.astype(np.float32), None

    class Model:
        freezes = False

        def merge(self, variables):
            return Merged()

    batch = {
        "inputs": np.zeros((2, 4), np.int32),
        "targets": np.array([[5, 6, 7, 8], [1, 2, 3, 4]], np.int32),
        "answers": np.array([[0, 1, 0, 0], [1, 0, 0, 1]], np.int32),
    }
    model: Any = Model()
    seen = jax.jit(lambda batch: step_loss.losses(model, {}, None, batch)[0])(batch)
    np.testing.assert_array_equal(seen, [[0, 6, 0, 0], [1, 0, 0, 4]])


BAD_LINES = {
    "{": "line 1: expected JSON, an object in each line",
    "{}": 'line 1: expected {"messages":',
    '{"messages": []}': 'line 1: expected {"messages":',
    '{"messages": [{"role": "boss", "content": "x"}]}': "message 0 has no role that is one of",
    '{"messages": [{"role": "user", "content": 3}]}': "message 0 has no content that is text",
    '{"messages": [{"role": [], "content": ""}]}': "message 0 has no role that is one of",
    '{"messages": [{"role": "user", "content": null}]}': "message 0 has no content that is text",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "message 0 has half a surrogate pair",
    '{"messages": [{"role": "assistant", "tool_calls": []}]}': "message 0 has no content that is",
    f'{{"messages": {"[" * 10**5}': "line 1: expected JSON, .*found .*nested too deeply",
    f'{{"messages": {"1" * 5000}}}': "line 1: expected JSON, .*found .*Exceeds the limit",
    '{"messages": NaN}': 'line 1: expected {"messages":',
    '"\\ud800"': 'line 1: expected {"messages":',
    '{"messages": "\0"}': "a binary file, not text: a NUL byte at offset 14",
    '{"messages": [{"role": "assistant", "content": "x"}], "tools": {}}': "expected 'tools' to be",
    '{"messages": [{"role": "assistant", "content": "x"}], "documents": [1]}': "expected 'docume",
    '{"messages": [{"role": "assistant", "content": "x"}], "chat_template_kwargs": 1}': "an object",
    '{"messages": [{"role": "user", "content": "x"}]}': "line 1: has no answer",
    '{"messages": [{"role": "assistant", "content": " "}]}': "line 1: has an empty answer",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_is_no_conversation_is_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError) as error:
        read_chats([str(tmp_path / "a.jsonl")], TOKENIZER, 32)
    assert re.search(re.escape(BAD_LINES[line]).replace(r"\.\*", ".*"), str(error.value))
    assert str(error.value).startswith(f"data='{tmp_path / 'a.jsonl'}': ")


def test_a_byte_order_mark_and_line_ends_of_windows_are_skipped(tmp_path):
    plain = lines(tmp_path / "a.jsonl", CHAT, CHAT)
    windows = tmp_path / "b.jsonl"
    text = Path(plain).read_text().replace("\n", "\r\n\r\n")
    windows.write_text("\ufeff" + text, encoding="utf-8", newline="")
    streams = [read_chats([str(path)], TOKENIZER, 200) for path in (plain, windows)]
    np.testing.assert_array_equal(streams[0].tokens, streams[1].tokens)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a"])
@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a device", "nothing"])
def test_what_is_no_file_of_conversations_is_refused(tmp_path, name, kind):
    make = {
        "a directory": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "nothing": lambda path: path.write_bytes(b""),
    }
    make[kind](tmp_path / name)
    sentence = "not from Parquet|there is no conversation|not a whole gzip file|" + kind
    with pytest.raises(ValueError, match=sentence):
        open_dataset(
            str(tmp_path / name),
            TOKENIZER,
            sequence_length=8,
            batch_size=1,
            seed=0,
            chat=True,
        )


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "has no chat template, in chat_template.jinja or as chat_template in"),
        ("{% for %}", r"chat_template.jinja: the chat template cannot be used \(line 1: "),
        ("{{ raise_exception('no system role') }}", r"line 1: .*not take the .*\(no system role"),
        ("{{ messages | length }}{{ messages[-1].content }}", "does not begin the message so"),
    ],
)
def test_a_template_that_does_not_serve_is_refused(tmp_path, template, sentence):
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=sentence):
        data = lines(tmp_path / "a.jsonl", CHAT)
        read_chats([data], str(tmp_path / "tokenizer.json"), 32)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--chat", "chat: expected data too"),
        ("--chat --data DATA", "chat: expected tokenizer too; add --tokenizer"),
        ("--chat-template-kwargs {}x", "chat_template_kwargs='{}x': expected a JSON object, such"),
        ('--chat-template-kwargs {"a":1}', "expected chat too; add --chat, or leave this out"),
        ("--eval-only", "eval_only: expected eval_data too"),
        ("--eval-only --eval-data DATA", "and neither of them is given"),
        ("--eval-only --eval-data DATA --init-from a --checkpoint-dir b", "and both of them is"),
        ("--eval-only --eval-data DATA --init-from DIR", "init_from='DIR': does not exist"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(tmp_path, capsys, arguments, sentence):
    data = lines(tmp_path / "a.jsonl", CHAT)
    with pytest.raises(SystemExit):
        main([word.replace("DATA", data) for word in arguments.split()])
    assert sentence in " ".join(capsys.readouterr().err.split())
