"""``--init-from``: the weights of another run, and nothing else of it."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.checkpoint.saved_checkpoint import find_checkpoint
from tests.train.config.test_defaults import saved_run
from tests.train.optimizer.test_schedule import logged
from train.checkpoint.initial_weights import check_weights
from train.config.config import ONE_DEVICE
from train.log.log_file import read_log
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.mesh import make_mesh
from train.parallel.model import ModelFunctions
from train.run.command_line import main, parse
from train.run.initial_state import changed_settings
from train.run.setup import prepare

MODEL = shlex.split("--model.num-layers 1 --log-interval 1 --overlap xla")
FIRST = shlex.split("--mesh.data 2 --mesh.tensor 2 --batch-size 4 --sequence-length 16 --steps 4")
#: Another mesh, sequence length, batch size, seed, optimizer and text.
SECOND = shlex.split(
    "--mesh.data 1 --mesh.tensor 4 --batch-size 3 --sequence-length 32 --steps 3 --seed 7"
    " --optimizer.learning-rate 0.02 --optimizer.warmup-steps 2 --optimizer.b1 0.8"
)


#: Models of Hugging Face.
FOLDERS = Path(__file__).parents[2] / "data" / "hugging_face"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run, of its steps 2 and 4."""
    directory = tmp_path_factory.mktemp("trained")
    saved = ["--checkpoint-dir", str(directory), "--save-interval", "2"]
    main([*MODEL, *FIRST, *saved, "--log-file", str(directory / "log")])
    return directory


@pytest.fixture
def other_text(tmp_path: Path) -> list[str]:
    (tmp_path / "other.txt").write_text("Some other text to go on with. " * 40)
    return ["--data", str(tmp_path / "other.txt")]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*MODEL, *SECOND, *arguments])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def saved_params(path: Path) -> dict[str, np.ndarray]:
    config = parse([*MODEL, *FIRST])
    model = ModelFunctions(config)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    abstract = state_on_mesh(model, optimizer, make_mesh(ONE_DEVICE))
    params = find_checkpoint(path).restore_params(abstract["params"])
    return {name: np.asarray(array) for name, array in params.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("", "--scan-layers 1 --zero 2 --mesh.fsdp 2 --mesh.tensor 2 --batch-size 4"),
        pytest.param("step_2", "", marks=pytest.mark.exhaustive),
    ],
)
def test_weights_alone_are_taken(capsys, tmp_path, trained, other_text, name, layout):
    source = trained / name
    log, saved = tmp_path / "log", tmp_path / "saved"
    main(
        [*MODEL, *SECOND, *other_text, "--init-from", str(source), "--log-file", str(log),
         "--checkpoint-dir", str(saved), "--save-interval", "1", "--model.rotary-base", "1e6",
         *shlex.split(layout)]
    )  # fmt: skip
    output = capsys.readouterr().out
    step = 2 if name else 4
    assert re.search(rf"weights from \S+/step_{step}; the optimizer, the schedule and", output)
    # Settings that keep the shape may differ, and are listed.
    assert "begin anew; not as there: model.rotary_base was 10000.0, is 1000000.0\n" in output
    # The run is new: its steps, its schedule and its log begin at the beginning.
    assert [event["event"] for event in read_log(log)] == ["start", "step", "step", "step"]
    assert logged(log) == {1: 0.0, 2: pytest.approx(0.01), 3: pytest.approx(0.02)}
    # The first step has learning rate 0, so that its weights are still those of the source.
    expected = saved_params(find_checkpoint(source).path)
    actual = saved_params(saved / "step_1")
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)


def test_a_resume_takes_precedence_and_says_so(capsys, tmp_path, trained):
    saved = shutil.copytree(trained, tmp_path / "saved")
    # What the run began with is not needed any more.
    arguments = ["--init-from", "gone", "--checkpoint-dir", str(saved), "--resume", "--steps", "5"]
    main([*MODEL, *FIRST, *arguments])
    output = capsys.readouterr().out
    assert "resumed from the checkpoint of step 4" in output
    assert "--init-from gone is not read: the run began with random weights, and goes on" in output
    assert "weights from" not in output
    assert "changed since: steps was 4, is 5\n" in output
    assert "--init-from" not in output.partition("to go on:")[2].partition("to compare:")[0]


def test_a_resume_with_another_folder_keeps_the_copy_of_the_runs_own(capsys, tmp_path):
    own, other = (str(FOLDERS / name) for name in ("llama3", "qwen3"))
    run = ["--checkpoint-dir", str(tmp_path), "--sequence-length", "16", "--batch-size", "8"]
    main([*run, "--init-from", own, "--steps", "1"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "hugging_face").iterdir()}
    main([*run, "--init-from", other, "--resume", "--steps", "2"])
    sentence = f"--init-from {other} is not read: the run began with {own}, and goes on"
    output = capsys.readouterr().out
    assert sentence in output
    # The copy of the tokenizer has another path, and the same contents.
    assert "changed since: steps was 1, is 2\n" in output
    main([*run, "--init-from", own, "--resume", "--steps", "3"])
    assert f"--init-from {own} is not read: that is where the run began" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "hugging_face").iterdir()} == files


def test_tokenizers_are_compared_by_their_contents(tmp_path):
    first, same, other = (str(tmp_path / name) for name in ("a", "b", "c"))
    for path, text in ((first, "{}"), (same, "{}"), (other, "[]")):
        Path(path).write_text(text)
    assert changed_settings({"tokenizer": first}, {"tokenizer": same}) == ""
    for changed in (other, str(tmp_path / "gone"), None):
        line = f"tokenizer was {first}, is {changed}"
        assert changed_settings({"tokenizer": first}, {"tokenizer": changed}) == line


def test_a_run_goes_on_with_stacked_layers_and_back(capsys, tmp_path, trained):
    saved, log = shutil.copytree(trained, tmp_path / "saved"), tmp_path / "log"
    arguments = [*MODEL, *FIRST, "--checkpoint-dir", str(saved), "--log-file", str(log)]
    main([*arguments, "--resume-step", "2", "--scan-layers", "1", "--steps", "3"])
    main([*arguments, "--resume"])
    output = capsys.readouterr().out
    for change in ("scan_layers was 0, is 1", "scan_layers was 1, is 0"):
        assert f"changed since: {change}" in output
    losses = [
        {event["step"]: event["loss"] for event in read_log(file) if event["event"] == "step"}
        for file in (log, trained / "log")
    ]
    # Activations are bfloat16, and a loop rounds them elsewhere.
    assert losses[0] == pytest.approx({n: losses[1][n] for n in (3, 4)}, rel=2e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--model.features 64", "model.features was 128, is 64; {}--model.features=128, or"),
        ("--model.num-layers 2", "model.num_layers was 1, is 2; {}--model.num-layers=1, or"),
        ("--model.tied-head", "model.tied_head was False, is True; {}--model.no-tied-head, or"),
    ],
)
def test_another_model_is_refused_with_the_flags_of_that_model(
    capsys, trained, arguments, sentence
):
    given = [*shlex.split(arguments), "--init-from", str(trained)]
    message = refused(capsys, *given)
    advice = "give the model that it was saved with, by "
    assert f"step_4: a checkpoint from another model: {sentence.format(advice)}" in message
    assert message.startswith(f"error: init_from='{trained}': ")
    flags = message.partition(advice)[2].partition(", or")[0]
    prepare(parse([*MODEL, *SECOND, *given, *shlex.split(flags)]))
    assert "from another model" in refused(
        capsys, *given, "--eval-only", "--eval-data", str(Path(__file__))
    )


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("", "--preset debug, or"),
        ("--model.num-layers 1", "--model.vocabulary-size=256 --model.num-layers=2 --model.feat"),
    ],
)
def test_a_model_of_another_preset_is_named_by_it(tmp_path, flags, advice):
    """Unless flags have changed the model of this run's preset: they would do so again."""
    saved_run(tmp_path, parse([]))
    config = parse(["--preset", "llama3.2-1b", *flags.split()])
    with pytest.raises(ValueError, match=f"from another model: .*, by {advice}"):
        check_weights(find_checkpoint(tmp_path), {}, config)


def test_what_is_no_checkpoint_is_refused_before_anything_is_made(capsys, tmp_path, trained):
    (tmp_path / "empty").mkdir()
    for path in ("empty", "missing", "empty/step_2"):
        directory = tmp_path / "saved"
        message = refused(
            capsys, "--init-from", str(tmp_path / path), "--checkpoint-dir", str(directory)
        )
        assert f"init_from='{tmp_path / path}'" in message
        problem = "holds no checkpoint" if path == "empty" else "does not exist"
        assert f"{problem}; give a directory of checkpoints, " in message
        assert not directory.exists()


def test_damaged_weights_are_refused(capsys, tmp_path, trained):
    source = shutil.copytree(trained / "step_4", tmp_path / "step_4")
    for file in (source / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(bytes(content))
    assert "damaged" in refused(capsys, "--init-from", str(source))


def test_a_run_that_still_trains_can_be_read(trained):
    """Reading takes no lock of the directory."""
    arguments = [*MODEL, *FIRST, "--checkpoint-dir", str(trained), "--resume", "--steps", "9"]
    running = prepare(parse(arguments))
    assert running.checkpoints is not None
    try:
        setup = prepare(parse([*MODEL, *SECOND, "--init-from", str(trained)]))
        assert setup.init_from is not None
        assert setup.init_from.path.name == "step_4"
    finally:
        running.checkpoints.close()
