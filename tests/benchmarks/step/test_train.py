"""The benchmark of the trainer's step on simulated devices."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import command_line
from benchmarks.comparison import candidates, comparing
from benchmarks.comparison.compiling import compile_cases, trace
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.timing import Timed, measure_case
from benchmarks.pytorch import FIRST_STEPS, runner
from benchmarks.step import train
from collective_matmul.rewrite import transform
from train.optimizer.state import with_weights


@pytest.mark.parametrize(
    ("sequences", "zero", "names"),
    [
        pytest.param(
            *(1, 0, ("xla", "rewrite", "explicit", "rewrite_jit")), marks=pytest.mark.exhaustive
        ),
        (2, 3, ("xla", "auto", "rewrite_jit")),  # They shard weights in rows and in columns.
    ],
)
def test_candidates_take_turns_with_one_state(make_mesh, sequences, zero, names):
    mesh = make_mesh({"tensor": 2})
    case = train.TrainCase("debug", 1, tokens=16, sequences=sequences, remat="none", zero=zero)
    operands = Operands(mesh, np.dtype("float32"))
    taking_part = [candidates.make(name, mesh, try_options=False) for name in names]
    made = []

    def build(candidate):
        program = case.build(operands, candidate)
        make = program.make
        assert make is not None
        return program._replace(make=lambda: made.append(make()) or made[-1])

    (compiled,) = compile_cases(taking_part, [build], threads=2)
    results, _ = measure_case(compiled, Timed(groups=2, seconds=1e-6))
    assert {name: result.failure for name, result in results.items()} == dict.fromkeys(names)
    (training,) = made
    # Each warms up three times and counts calls once, then runs once in each group.
    steps = len(training.first_metrics) + len(training.losses)
    assert steps % len(names) == 0 and steps >= len(names) * (2 + 2)
    # All take a step from the first parameters, which it leaves as they are; then turns.
    assert int(training.state["step"]) == 1 + len(training.losses)
    assert {float(first["learning_rate"]) for first in training.first_metrics.values()} == {0}
    for result in results.values():
        # float32 sums in another order.
        assert result.losses[0] == pytest.approx(results["xla"].losses[0], rel=1e-6)
        assert result.gradient_norm == pytest.approx(results["xla"].gradient_norm, rel=1e-5)
        assert len(result.losses) == FIRST_STEPS and result.losses[7] < result.losses[0] - 0.01
    assert all(np.isfinite(leaf).all() for leaf in training.state["params"].values())


def test_candidates_have_states_of_their_own_kinds(make_mesh):
    """Without 8 bits, a state has more weights in the compute dtype, and no magnitudes."""
    mesh = make_mesh({"tensor": 2})
    case = train.TrainCase("debug", 1, tokens=16, sequences=1, remat="none")
    operands, made = Operands(mesh, np.dtype("bfloat16")), []

    def build(candidate):
        program = case.build(operands, candidate)
        make = program.make
        assert make is not None
        return program._replace(make=lambda: made.append(make()) or made[-1])

    names = ("xla", "xla_fp8_tensorwise")
    taking_part = [candidates.make(name, mesh, try_options=False) for name in names]
    (compiled,) = compile_cases(taking_part, [build], threads=2)
    results, _ = measure_case(compiled, Timed(groups=2, seconds=1e-6))
    assert {name: result.failure for name, result in results.items()} == dict.fromkeys(names)
    (training,) = made
    again = with_weights(training.state, training.state)
    jax.tree.map(np.testing.assert_array_equal, again, training.state)


def test_a_step_is_rewritten_once(make_mesh, monkeypatch):
    made = []
    rewriter = transform.Rewriter

    def counted(name: Any, *options: Any) -> Any:
        made.append(name)
        return rewriter(name, *options)

    monkeypatch.setattr(transform, "Rewriter", counted)
    case = train.TrainCase("debug", layers=1, tokens=16, sequences=1, remat="none")
    operands = Operands(make_mesh({"tensor": 2}), np.dtype("float32"))
    rewritten = {"xla": 0, "auto": 0, "rewrite": 1, "explicit": 0, "rewrite_jit": 1}
    for name, times in rewritten.items():
        made.clear()
        candidate = candidates.make(name, operands.mesh)
        trace(candidate, case.build(operands, candidate))
        assert len(made) == times


def test_a_case_says_what_throughput_is_counted_in(make_mesh):
    case = train.TrainCase("llama3-8b", layers=8, tokens=8192, sequences=1, remat="none")
    described = case.describe(Operands(make_mesh({"tensor": 4}), np.dtype("bfloat16")))
    assert described["tokens_per_step"] == 8192
    # 6 FLOPs for each weight of a block and of the head, then those of attention.
    expected = 6 * (8 * 218_103_808 + 525_336_576) + 6 * 8 * 32 * 128 * 8192
    assert described["flops_per_token"] == expected


def test_pytorch_is_timed_before_jax_and_joins_its_cases(tmp_path, monkeypatch, capsys):
    order, asked = [], []

    def time_pytorch(cases, **settings):
        order.append("torch")
        asked.extend((case, settings["devices"]) for case in cases)
        found = {"name": "debug 1 layers 2×16 ZeRO 3 remat full", "candidate": "torch_fsdp"}
        losses = [5.5 - 0.25 * step for step in range(8)]
        return [
            {**found, "samples": [0.5, 0.25, 1.0], "peak_bytes": 3 << 29, "losses": losses}
        ], "-"

    def make_mesh(settings):
        order.append("jax")
        return made(settings)

    made = comparing.make_mesh
    monkeypatch.setattr(comparing, "make_mesh", make_mesh)
    monkeypatch.setattr(runner, "time_pytorch", time_pytorch)
    arguments = (
        "train --platform cpu --devices 2 --preset debug --layers 1 --sequence-lengths 16"
        " --sequences 2 --remat full --zero 0 3 --groups 5 --candidates xla --no-try-options"
        " --group-seconds 1e-6 --baselines torch_fsdp torch_async_tp --output"
    )
    command_line.main([*arguments.split(), str(tmp_path)])
    assert order == ["torch", "jax"]
    assert [(case["name"], case["candidates"], devices) for case, devices in asked] == [
        ("debug 1 layers 2×16 remat full", ["torch_async_tp"], 2),
        ("debug 1 layers 2×16 ZeRO 3 remat full", ["torch_fsdp"], 2),
    ]
    tensor, sharded = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert tensor["candidates"]["torch_async_tp"]["failure"] == "-"
    assert list(sharded["candidates"]) == ["xla", "torch_fsdp"]
    for case in (tensor, sharded):
        result = case["candidates"]["xla"]
        assert result["peak_bytes"] > result["temporary_bytes"] > 0
        assert len(result["losses"]) == 8 and result["losses"][7] < result["losses"][0]
    # Weights and sequences are the same, and so is the loss but for rounding to bfloat16.
    first, other = (case["candidates"]["xla"]["losses"][0] for case in (tensor, sharded))
    np.testing.assert_allclose(first, other, rtol=1e-2)
    table = capsys.readouterr().out.partition("## Training steps")[2].splitlines()
    # 32 tokens in the median of half a second, by each of two devices.
    cells = "torch_fsdp | 500.0 | 250.0 | 1000.0 | 32 | 0.0% | full | 1.5 | 5.5000 → 3.7500 |  |"
    assert table[-1] == f"| {sharded['name']} | {cells}"
    assert [line.split(" | ")[1] for line in table[-3:]] == ["xla", "xla", "torch_fsdp"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--baselines torch", "baselines: 'torch' is unknown; expected torch_tp,"),
        ("--baselines torch_tp", "devices=0: expected at least 2"),
        ("--baselines torch_fsdp --devices 2 --zero 3", "sequences=1 of"),
    ],
)
def test_baselines_that_do_not_fit_are_refused(monkeypatch, capsys, arguments, sentence):
    monkeypatch.delattr(runner, "time_pytorch")
    with pytest.raises(SystemExit):
        command_line.main(["train", "--platform", "cpu", "--preset", "debug", *arguments.split()])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", ["auto_fp8_rowwise", "ring", "ring_fp8_rowwise"])
def test_a_candidates_recipe_is_the_trainers(make_mesh, monkeypatch, name):
    seen = []

    def sharded_step(config, *arguments, rewrite):
        seen.append((config.overlap, config.fp8))
        return lambda state, batch: None

    monkeypatch.setattr(train, "sharded_step", sharded_step)
    operands = Operands(make_mesh({"tensor": 2}), np.dtype("float32"))
    flags = "--fp8 tensorwise"
    case = train.TrainCase("debug", 1, 16, 1, "none", trainer=flags)
    case.build(operands, candidates.make(name, operands.mesh))
    overlap, _, recipe = name.partition("_fp8_")
    assert seen == [(overlap, recipe or "tensorwise")]


def test_flags_of_the_trainer_reach_both():
    flags = "--gradient-accumulation-steps 2 --optimizer.b1 0.5"
    case = train.TrainCase("debug", 1, 16, 4, "dots", 3, flags, ("torch_fsdp", "torch_tp"))
    assert case.config().gradient_accumulation_steps == 2
    described = case.for_pytorch()
    assert described is not None and json.loads(json.dumps(described)) == described
    assert described["candidates"] == ["torch_fsdp"]
    assert described["gradient_accumulation_steps"] == 2 and described["batch_size"] == 4
    assert described["optimizer"]["b1"] == 0.5 and described["model"]["num_layers"] == 1
    assert described["zero"] == 3 and described["remat"] == "dots"
