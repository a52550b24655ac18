"""Processes that train together compute what one process with all their devices computes."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest

from models.checkpoint.saved_checkpoint import whole_steps
from tests.train import process_faults
from tests.train.faults import curve, reread
from tests.train.processes.test_launchers import OPEN_MPI, SLURM
from tests.train.trainers import ARGUMENTS, Trainers, train
from train.log.log_file import read_log
from train.run.command_line import main

# The rounding of bfloat16 activations, where sums of devices are added in another order.
TOLERANCE = 2e-3


def flags(folder: Path, name: str, more: str = "") -> list[str]:
    named = ["--checkpoint-dir", str(folder / name), "--log-file", str(folder / f"{name}.jsonl")]
    return [*named, *shlex.split(more)]


def assert_same_curve(actual: Path, expected: Path) -> None:
    actual_curve, expected_curve = curve(actual), curve(expected)
    assert actual_curve.keys() == expected_curve.keys()
    for step, values in expected_curve.items():
        np.testing.assert_allclose(actual_curve[step], values, rtol=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "resumed"),
    [
        # Shards of weights over processes: the chain and the killed run below have them.
        ("--mesh.data 2 --scan-layers 1 --model.num-layers 3", "--scan-layers 0"),
        # Both processes read the same sequences, and each has its part of them.
        ("--mesh.context 2 --mesh.data 1 --zero 3 --separate-documents", ""),
    ],
)
def test_two_processes_train_as_one_and_only_the_first_prints(tmp_path, capsys, settings, resumed):
    more = f"{settings} --mesh.tensor 1 --steps 3"
    outputs = train(flags(tmp_path, "two", more), count=2, devices=1)
    main([*ARGUMENTS.split(), *flags(tmp_path, "one", more)])
    capsys.readouterr()
    assert_same_curve(tmp_path / "two.jsonl", tmp_path / "one.jsonl")
    assert "processes: 2, with one device each; rings" in "\n".join(outputs[0])
    assert outputs[1] == []
    start, *records = read_log(tmp_path / "two.jsonl")
    assert (start["hardware"]["processes"], start["hardware"]["devices"]) == (2, 2)
    assert [record["step"] for record in records] == [1, 2, 3]
    # Process 1 wrote a part of it; one process restores and verifies it.
    assert whole_steps(tmp_path / "two") == [3]
    more += f" {resumed} --steps 4 --resume"
    main([*ARGUMENTS.split(), *flags(tmp_path, "two", more)])
    assert "resumed from the checkpoint of step 3\n" in capsys.readouterr().out


def slurm(count: int):
    """The variables of a task, each on a node of its own that is this machine."""

    def variables(number: int) -> dict[str, str]:
        return SLURM | {
            "SLURM_STEP_NODELIST": "localhost,localhost",
            "SLURM_NTASKS": str(count),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
            "SLURM_PROCID": str(number),
            "SLURM_NODEID": str(number),
        }

    return variables


def open_mpi(count: int):
    """The variables of a process of mpirun."""

    def variables(number: int) -> dict[str, str]:
        return OPEN_MPI | {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": str(count),
            "OMPI_COMM_WORLD_RANK": str(number),
        }

    return variables


@pytest.mark.exhaustive
def test_processes_times_devices(tmp_path):
    """Four devices as 2 × 2, 4 × 1 and 1 × 4, started by each launcher: a chain of resumes through
    them trains as one process does that is not interrupted."""
    text = tmp_path / "held_out.txt"
    text.write_text("A held-out text. " * 40)
    run = f"--zero 3 --optimizer.kind muon --optimizer.muon-dtype float32 --eval-data {text}"
    run += " --mesh.data 1 --mesh.fsdp 2 --mesh.tensor 2 --eval-interval 2"
    run += " --save-interval 4 --optimizer.decay-steps 12 --gradient-accumulation-steps 2"
    main([*ARGUMENTS.split(), *flags(tmp_path, "whole", f"{run} --steps 8")])
    across = "--distributed.tensor-across-processes"
    for last, count, launched in ((3, 2, slurm(2)), (6, 4, open_mpi(4))):
        more = f"{run} {across} --steps {last} {'--resume' if last > 3 else ''}"
        options = {"count": count, "devices": 4 // count, "launched": launched}
        train(flags(tmp_path, "chain", more), **options)
        assert max(whole_steps(tmp_path / "chain")) == last
    main([*ARGUMENTS.split(), *flags(tmp_path, "chain", f"{run} --steps 8 --resume")])
    chain, whole = tmp_path / "chain.jsonl", tmp_path / "whole.jsonl"
    assert_same_curve(chain, whole)
    losses = [
        {event["step"]: event["loss"] for event in read_log(log) if event["event"] == "evaluation"}
        for log in (chain, whole)
    ]
    assert {2, 4, 6, 8} <= losses[0].keys()
    for step, loss in losses[1].items():
        np.testing.assert_allclose(losses[0][step], loss, rtol=TOLERANCE)


@pytest.mark.exhaustive
def test_a_signal_at_one_process_saves_on_all(tmp_path):
    """Each signal has tests of a process and its parent in test_shutdown.py, test_supervisor.py."""
    arguments = flags(tmp_path, "run", "--mesh.tensor 2 --steps 100000 --save-interval 50000")
    with Trainers(arguments, count=2, devices=2) as trainers:
        trainers.wait_for_steps(3)
        trainers.processes[1].send_signal(signal.SIGTERM)
        assert trainers.finish() == [128 + signal.SIGTERM] * 2, trainers.everything()
        (saved,) = whole_steps(tmp_path / "run")
        assert f"SIGTERM: stopped after step {saved}; its checkpoint" in trainers.errors[0][-1]
        assert saved == trainers.logged[-1]
    reread(tmp_path / "run" / f"step_{saved}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("only", "common", "sentence"),
    [
        ("--seed 1", "", "error: process 1 has another run than process 0: seed 1, not 0; give"),
        ("--data missing.txt", "", "error: process 1: data='missing.txt': no file matches"),
        ("", "--mesh.tensor 4", "error: mesh.tensor=4: the tensor axis would span processes of 2"),
    ],
)
def test_bad_input_is_refused_by_all_and_printed_by_the_first(only, common, sentence):
    arguments = shlex.split(common)
    with Trainers(arguments, count=2, devices=2, only={1: shlex.split(only)}) as trainers:
        assert trainers.finish() == [2, 2], trainers.everything()
        (line,) = trainers.errors[0]
        assert sentence in line
        assert trainers.errors[1] == []


@pytest.mark.exhaustive
def test_gpus_that_cannot_be_shared_are_refused_before_any_is_opened(tmp_path):
    script = tmp_path / "nvidia-smi"
    gpus = "\n".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})" for n in range(3))
    script.write_text(f"#!/bin/sh\necho '{gpus}'\n")
    script.chmod(0o755)
    # JAX would find no GPU here.
    variables = {"JAX_PLATFORMS": "cuda", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with Trainers([], count=2, devices=1, variables=variables) as trainers:
        assert trainers.finish() == [2, 2], trainers.everything()
        (line,) = trainers.errors[0]
        assert line.startswith("error: processes 0, 1 are on a node where they see the same 3 GPUs")
        assert trainers.errors[1] == []


@pytest.mark.exhaustive
def test_killed_processes_lose_nothing_that_was_saved(tmp_path):
    process_faults.kill_often(tmp_path, kills=2, count=2, seed=5)
