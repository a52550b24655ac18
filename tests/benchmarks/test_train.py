"""The benchmark of the trainer's step on simulated devices."""

from __future__ import annotations

import numpy as np

from benchmarks import candidates, train
from benchmarks.compiling import compile_cases, trace
from benchmarks.measuring import Timed, measure_case
from benchmarks.operands import Operands
from collective_matmul.rewrite import transform


def test_candidates_take_turns_with_one_state(make_mesh):
    mesh = make_mesh({"tensor": 2})
    case = train.TrainCase("debug", layers=1, tokens=16, sequences=1, remat="none")
    operands = Operands(mesh, np.dtype("float32"))
    names = ("xla", "rewrite")
    taking_part = [candidates.make(name, mesh) for name in names]
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
    steps = int(training.state["step"])
    assert steps % len(names) == 0 and steps >= len(names) * (2 + 2)
    assert all(np.isfinite(leaf).all() for leaf in training.state["params"].values())


def test_a_step_is_rewritten_once(make_mesh, monkeypatch):
    made = []
    rewriter = transform.Rewriter
    monkeypatch.setattr(transform, "Rewriter", lambda name: made.append(name) or rewriter(name))
    case = train.TrainCase("debug", layers=1, tokens=16, sequences=1, remat="none")
    operands = Operands(make_mesh({"tensor": 2}), np.dtype("float32"))
    for name, times in (("xla", 0), ("auto", 0), ("rewrite", 1)):
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
