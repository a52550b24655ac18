"""Experiment trackers get what the log gets, and a missing package is a sentence."""

from __future__ import annotations

import importlib.util
import math
import shlex
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from tests.train.reports import RECORD, reporter
from train.log.log_file import read_log
from train.log.trackers import TensorBoard, WeightsAndBiases
from train.run.command_line import main

Event: Any = vars(event_pb2)["Event"]  # protobuf makes it when it is imported.

RUN = shlex.split(
    "--model.num-layers 1 --mesh.data 2 --mesh.tensor 2 --batch-size 4 --sequence-length 16"
    " --log-interval 1 --overlap xla --steps 3"
)


def events(directory: Path) -> list[Any]:
    """The events of a folder in the order of their files: length, its checksum, data, checksum."""
    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    """Values by tag and step, the later one of an equal step."""
    return {
        (value.tag, event.step): value.simple_value
        for event in events(directory)
        for value in event.summary.value
        if value.HasField("simple_value")
    }


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*RUN, *arguments])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


class FakeWandb:
    """The part of the package wandb that is used, which keeps what it is told."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []

    def init(self, *, id: str, resume: str) -> FakeRun:
        assert resume == "allow"
        self.runs.append(FakeRun(id))
        return self.runs[-1]


class FakeRun:
    def __init__(self, id: str) -> None:
        self.id = id
        self.metrics: dict[str, Any] = {}
        self.descriptions: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.exit_code: int | None = None
        self.config = SimpleNamespace(update=self._update)

    def _update(self, description: dict[str, Any], *, allow_val_change: bool) -> None:
        assert allow_val_change, "a resumed run has other values"
        self.descriptions.append(description)

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics[name] = options

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake: Any = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    fake.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return fake


def test_trackers_get_what_the_log_gets(capsys, tmp_path, wandb):
    (tmp_path / "text").write_text("Held-out text of more than a sequence. " * 3)
    log, board = tmp_path / "log", tmp_path / "board"
    arguments = [
        *RUN, "--log-file", str(log), "--tensorboard", str(board), "--wandb",
        "--eval-data", str(tmp_path / "text"), "--checkpoint-dir", str(tmp_path / "saved"),
    ]  # fmt: skip
    main(arguments)
    assert "--tensorboard" not in capsys.readouterr().out.partition("to compare:")[2]
    main([*arguments, "--steps", "4", "--resume"])

    def expected(event: dict[str, Any]) -> dict[str, float]:
        names = (name for name in event if name not in ("event", "step"))
        return {
            f"{event['event']}/{name}": event[name] for name in names if event[name] is not None
        }

    reported = [event for event in read_log(log) if event["event"] in ("step", "evaluation")]
    assert len(reported) == 4 + 2
    actual = scalars(board)
    assert actual == {
        (name, event["step"]): pytest.approx(value, rel=1e-6)  # Events hold float32.
        for event in reported
        for name, value in expected(event).items()
    }
    assert ("evaluation/perplexity", 4) in actual
    # Texts describe both parts of the run.
    texts = {v.tag: v for e in events(board) for v in e.summary.value if v.HasField("tensor")}
    assert sorted(tag.partition("/")[0] for tag in texts) == ["resume", "start"]
    assert all(b'"sequence_length": 16' in v.tensor.string_val[0] for v in texts.values())

    first, second = wandb.runs
    assert first.id == second.id, "the resumed run continues the first"
    assert first.metrics["*"] == {"step_metric": "train_step"}
    logged = [*first.logged, *second.logged]
    assert logged == [{**expected(event), "train_step": event["step"]} for event in reported]
    assert first.descriptions[0]["configuration"]["steps"] == 3
    assert second.descriptions[0]["configuration"]["steps"] == 4
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "changed since: steps was 3, is 4\n" in capsys.readouterr().out


def test_a_run_that_stops_with_an_error_is_marked_as_failed(wandb):
    with pytest.raises(ZeroDivisionError), reporter(WeightsAndBiases("id")):
        raise ZeroDivisionError
    assert wandb.runs[0].exit_code == 1


def test_a_resumed_run_drops_the_events_that_it_repeats(tmp_path):
    for first_step in (0, 2):
        board = TensorBoard(str(tmp_path), first_step)
        board.write("step", {"step": 3, "loss": 1.0})
        board.close(failed=False)
    starts = [e.step for e in events(tmp_path) if e.session_log.status == e.session_log.START]
    assert starts == [3], "TensorBoard drops events from this step on"


def test_unknown_and_infinite_numbers_are_no_scalars(tmp_path, wandb):
    values = {"step": 3, "mfu": None, "loss": math.inf, "grad_norm": math.nan, "tflops": 2.0}
    board, run = TensorBoard(str(tmp_path), 0), WeightsAndBiases("id")
    for writer in (board, run):
        writer.write("step", values)
        writer.close(failed=False)
    assert scalars(tmp_path) == {("step/tflops", 3): 2.0}
    assert wandb.runs[0].logged == [{"step/tflops": 2.0, "train_step": 3}]


@pytest.mark.parametrize(
    ("flag", "package", "extra"),
    [("--tensorboard x", "tensorboardX", "tensorboard"), ("--wandb", "wandb", "wandb")],
)
def test_a_missing_package_is_a_sentence(capsys, monkeypatch, tmp_path, flag, package, extra):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    message = refused(capsys, *shlex.split(flag), *saved)
    assert f"needs the package {package}; pip install '.[{extra}]' in the repository" in message
    assert not (tmp_path / "saved").exists()


def test_a_login_that_is_missing_is_a_sentence(capsys, monkeypatch, wandb):
    def init(**options: Any) -> None:
        raise wandb.Error("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    message = refused(capsys, "--wandb")
    assert "wandb: No API key configured; run `wandb login`, set WANDB_MODE=offline" in message


def test_the_events_of_another_run_are_not_mixed_with_these(capsys, tmp_path):
    TensorBoard(str(tmp_path), 0).close(failed=False)
    assert "holds an earlier run's events" in refused(capsys, "--tensorboard", str(tmp_path))
    (tmp_path / "file").touch()
    message = refused(capsys, "--tensorboard", str(tmp_path / "file"))
    assert "cannot be written (File exists)" in message


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_the_package_wandb_writes_a_run_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = WeightsAndBiases("abcd")
    run.write("start", {"configuration": {"steps": 3}})
    run.write("step", {"step": 10, "loss": RECORD.loss})
    run.write("step", {"step": 5, "loss": RECORD.loss})
    run.close(failed=False)
    (written,) = tmp_path.rglob("run-abcd.wandb")
    assert written.stat().st_size > 0
