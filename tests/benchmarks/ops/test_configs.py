"""Tuning of configurations: wrong ones and those that hang are left out, the fastest is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from benchmarks import command_line
from benchmarks.measuring.isolated import HUNG, Message
from benchmarks.ops import configs, tilings
from benchmarks.ops.config_trial import ConfigTrial
from benchmarks.ops.configs import Configs, Outcome, fastest
from benchmarks.ops.ops import Op
from collective_matmul.data import MeasuredData
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import MatmulProblem
from collective_matmul.ops.matmul.backends import register, unregister
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.xla import Xla


@dataclass(frozen=True)
class Fault:
    """A configuration that makes a row wrong, or leaves one as it was; or does neither."""

    kind: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class Toy(Xla):
    """The reference, with a fault where its configuration has one."""

    fault: Fault = Fault("none")
    name = "toy"

    def all_gather_matmul(self, *args: Any, **kwargs: Any) -> Any:
        ys, gathered = super().all_gather_matmul(*args, **kwargs)
        return tuple(map(self._spoilt, ys)), gathered

    def matmul_reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        y, gathered = super().matmul_reduce_scatter(*args, **kwargs)
        return self._spoilt(y), gathered

    def matmul_all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._spoilt(super().matmul_all_reduce(*args, **kwargs))

    def _spoilt(self, y: jax.Array) -> jax.Array:
        match self.fault.kind:
            case "early":
                return y.at[2].set(y[3])
            case "unwritten":
                return y.at[2].set(jnp.nan)
            case "raises":
                raise ValueError("this tiling does not fit\nmore about it")
        return y

    def configurations(self, site: Site) -> Sequence[Fault]:
        return [Fault(kind) for kind in ("early", "none", "unwritten", "raises", "also none")]

    def configured(self, configuration: Any) -> Toy:
        return replace(self, fault=configuration)


TEXTS = [json.dumps(config.to_json()) for config in Toy().configurations(None)]  # type: ignore[arg-type]
EARLY, RIGHT, UNWRITTEN, RAISES, ALSO_RIGHT = TEXTS
ARGUMENTS = (
    "configs --platform cpu --devices 2 --dtype float32 --models tiny --rows 16"
    " --ops all_gather_matmul --groups 1 --group-seconds 0.001 --lead-seconds 0.001"
    " --compile-threads 2"
)


@pytest.fixture
def toy() -> Iterator[Toy]:
    backend = Toy()
    register(backend)
    yield backend
    unregister("toy")


@pytest.mark.parametrize("op", get_args(Op))
def test_a_wrong_row_is_counted_and_so_is_one_that_was_never_written(op: Op) -> None:
    settings = Configs(models=("tiny",), ops=(op,), rows=(16,))
    (site,) = settings.sites(2).values()
    backend = Toy()
    chosen = {text: Fault(json.loads(text)["kind"]) for text in TEXTS}
    trial = ConfigTrial(site, jax.devices(), backend, chosen, threads=2)
    assert trial.wrong(RIGHT) == 0
    row = 2 * trial.program.repetitions * site.columns
    assert trial.wrong(UNWRITTEN) == row
    early = trial.wrong(EARLY)
    assert isinstance(early, int) and row / 4 < early < row
    assert trial.wrong(RAISES) == "ValueError: this tiling does not fit"


def test_a_run_leaves_a_table(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run_isolated(work, arguments, step_seconds, note):
        class Here:
            """A connection to this process."""

            def send(self, message: Message) -> None:
                if message.result is not None:
                    note(message)

        work(*arguments(), Here())

    monkeypatch.setattr(configs, "run_isolated", run_isolated)
    command_line.main([*ARGUMENTS.split(), "--backend", "toy", "--output", str(tmp_path)])
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert set(case["times"]) == {"xla", "toy", "compute_only", RIGHT, ALSO_RIGHT}
    assert set(case["wrong"]) == {EARLY, UNWRITTEN, RAISES} and not case["failure"]
    assert case["best"] == min((RIGHT, ALSO_RIGHT), key=lambda text: case["times"][text][1])
    (record,) = MeasuredData.from_text((tmp_path / "toy_configs.jsonl").read_text()).records
    assert record.config == json.loads(case["best"])
    name = "all_gather_matmul tiny up M=16"
    assert f"{name}: kind early: " in capsys.readouterr().out
    assert f"| {name} |" in (tmp_path / "report.md").read_text()


@pytest.mark.needs("fused")
def test_sites_that_a_backend_does_not_support_say_why(tmp_path: Path) -> None:
    """In a process of its own: fused kernels do not run on CPUs."""
    command_line.main([*ARGUMENTS.split(), "--output", str(tmp_path)])
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert "Hopper GPUs only" in case["failure"] and not case["times"]


def test_what_hangs_has_no_times() -> None:
    outcome = Outcome("site")
    assert outcome.add(Message("site", RIGHT, 0)) == ""
    assert outcome.add(Message("site", EARLY, 17)).endswith(": 17 wrong")
    assert HUNG in outcome.add(Message("site", UNWRITTEN, HUNG))
    assert outcome.wrong == {EARLY: "17 wrong", UNWRITTEN: HUNG} and not outcome.done
    assert outcome.add(Message("site", "", HUNG)) == HUNG
    assert outcome.done
    table = fastest(
        {"cases": [{"name": "site", "times": {}, "best": "", "wrong": {}} | vars(outcome)]}
    )
    assert "| site |" in table and HUNG in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("configs --backend quick", "backend: 'quick' is unknown; expected xla, "),
        ("configs --configs 0", "configs=0: expected at least 1"),
        ("configs --lead-seconds 0", "lead_seconds=0.0: expected more than 0"),
        (
            "configs --backend ring --platform cpu --devices 3 --rows 16",
            "rows=16: not divisible by 3 devices",
        ),
        ("tilings --output t.jsonl --models 8B", "models: '8B' is unknown; expected llama3-8b, "),
        ("tilings --output nowhere/t.jsonl", "output=nowhere/t.jsonl: there is no folder nowhere"),
        ("tilings --output t.jsonl", "the kernel runs on Hopper GPUs; run this on one"),
        ("fp8_matmuls --layers gate", "layers: 'gate' is unknown; expected gate and up, down, "),
        ("fp8_matmuls --platform cpu", "the kernel runs on Hopper GPUs; run this on one"),
    ],
)
def test_settings_that_nothing_can_be_measured_with(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(arguments.split())
    assert sentence in capsys.readouterr().err


def test_tilings_of_every_tile_are_timed() -> None:
    """A model that is wrong about one size of tiles must not hide the others."""
    problem = MatmulProblem(1, 8192, (4096, 4096), (14336,), x_contracted_axis=1)
    tiles = [(each.tile_m, each.tile_n) for each in tilings.likeliest(problem)]
    assert len(set(tiles)) > 2
    assert set(tiles[: len(set(tiles))]) == set(tiles)
