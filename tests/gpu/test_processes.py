"""Processes with GPUs of their own.

Two of two GPUs each: NCCL carries rings across them, peers' copies those within. Two trainers that
nothing binds to GPUs: they share those that they see.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peers.timeout_reports import TIMEOUT_VARIABLE
from tests import processes
from tests.conftest import skip_without
from tests.hopper import skip_without_hopper
from tests.processes import ACROSS, LOCAL_DEVICES, PROCESSES
from tests.train.faults import curve
from tests.train.trainers import Trainers, train

pytestmark = pytest.mark.gpu


def test_rings_across_processes_and_within(tmp_path: Path) -> None:
    if jax.default_backend() == "cpu":
        environments = [processes.ON_THE_CPU] * PROCESSES
    else:
        skip_without(PROCESSES * LOCAL_DEVICES)
        environments = [on_gpus(number) for number in range(PROCESSES)]
    for reports in processes.start(environments, tmp_path):
        assert reports
        for report in reports:
            assert report.error <= 1, report
        across = [r for r in reports if tuple(r.mesh) == ACROSS]
        assert all(r.decisions == ["xla"] for r in across if r.implementation is None)
        warnings = [sentence for r in across for sentence in r.warnings]
        assert warnings
        assert len(set(warnings)) == len(warnings)


#: Kernels that store to arrays of peers need XLA's memory to be preallocated, beside that of this
#: process.
OWN_POOL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}


@pytest.mark.parametrize("sees_all", [False, True])
@pytest.mark.parametrize("part", ["exchanges", "kernels", "gradients", "choices"])
def test_peer_kernels_across_processes(part: str, sees_all: bool) -> None:
    """Each process sees one GPU, or all of them."""
    if jax.default_backend() == "cpu":
        environments = [processes.ON_THE_CPU | {"JAX_NUM_CPU_DEVICES": "1"}] * 2
    else:
        skip_without(2)
        skip_without_hopper()
        count = min(4, jax.device_count())
        environments = [
            (of_all(count, number) if sees_all else see_gpus([number])) | OWN_POOL
            for number in range(count)
        ]
    count = len(environments)
    processes.run("tests.gpu.peer_processes", environments, [[str(count), part]] * count)


def of_all(count: int, number: int) -> dict[str, str]:
    """The environment of a process that sees the GPUs of all, and has the one of its number."""
    return see_gpus(range(count)) | {"JAX_LOCAL_DEVICE_IDS": str(number)}


@pytest.mark.usefixtures("_with_kernels")
def test_a_process_that_ends_lets_the_kernels_of_others_end() -> None:
    skip_without(2)
    environments = [see_gpus([n]) | OWN_POOL | {TIMEOUT_VARIABLE: "10"} for n in range(2)]
    processes.run("tests.gpu.peer_processes", environments, [["2", "alone"]] * 2)


TRAINERS = "--preset debug --log-interval 1 --distributed.heartbeat-timeout-seconds 30"


@pytest.mark.parametrize("settings", ["--mesh.data 2", "--mesh.fsdp 2 --zero 3 --scan-layers 1"])
def test_two_trainers_share_the_gpus_of_their_node(tmp_path: Path, settings: str) -> None:
    for count in (1, 2):
        more = f"{settings} --mesh.tensor 1 --steps 12 --log-file {tmp_path}/{count}.jsonl"
        devices, variables = (2 // count, {"CUDA_VISIBLE_DEVICES": ""})
        if jax.default_backend() != "cpu":
            skip_without(2)
            variables = see_gpus(range(2))
        options = {"devices": devices, "variables": variables, "common": TRAINERS}
        outputs = train(shlex.split(more), count=count, **options)
    assert "processes: 2, with one device each" in "\n".join(outputs[0])
    one, two = (curve(tmp_path / f"{count}.jsonl") for count in (1, 2))
    assert one.keys() == two.keys() == set(range(1, 13))
    for step, values in one.items():
        # Loss and norm of the gradient, in bfloat16: sums have another order with two processes,
        # and on GPUs in each run.
        rtol = [1e-2, 0.1]
        assert np.all(np.abs(np.subtract(two[step], values)) <= np.multiply(rtol, values))


#: Wide enough that kernels that store to arrays of peers take part.
WIDE = "--model.features 1024 --model.hidden-features 4096 --batch-size 4 --sequence-length 512"


def test_two_trainers_with_a_tensor_axis_across_them(tmp_path: Path) -> None:
    """Its programs have kernels that address peers, and the losses of one process."""
    (tmp_path / "held_out.txt").write_text("A held-out text. " * 2000)
    more = f"{WIDE} --eval-data {tmp_path}/held_out.txt --eval-interval 3 --eval-batches 1"
    more += " --mesh.data 1 --mesh.fsdp 1 --mesh.tensor 2 --steps 6"
    more += " --distributed.tensor-across-processes"
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    if jax.default_backend() != "cpu":
        skip_without(2)
        skip_without_hopper()
        variables = see_gpus(range(2)) | OWN_POOL
    for count in (1, 2):
        arguments = shlex.split(f"{more} --log-file {tmp_path}/{count}.jsonl")
        options = {"devices": 2 // count, "variables": variables, "common": TRAINERS}
        outputs = train(arguments, count=count, **options)
    if jax.default_backend() != "cpu":
        assert "kernels that address peers' memory are allowed" in "\n".join(outputs[0])
    one, two = (curve(tmp_path / f"{count}.jsonl") for count in (1, 2))
    assert one.keys() == two.keys() == set(range(1, 7))
    for step, (loss, _) in one.items():
        # Sums have another order, in bfloat16.
        np.testing.assert_allclose(two[step][0], loss, rtol=1e-2)


def test_two_trainers_that_see_one_gpu_are_refused() -> None:
    if jax.default_backend() == "cpu":
        pytest.skip("simulated devices are not shared")
    options = {"devices": 1, "variables": see_gpus([0]), "common": TRAINERS}
    with Trainers([], count=2, **options) as trainers:
        assert trainers.finish() == [2, 2], trainers.everything()
        (line,) = trainers.errors[0]
        assert "see the same 1 GPU, which 2 processes cannot share evenly" in line
        assert trainers.errors[1] == []


def on_gpus(number: int) -> dict[str, str]:
    """The environment of a process with GPUs of its own."""
    return see_gpus(range(number * LOCAL_DEVICES, (number + 1) * LOCAL_DEVICES))


def see_gpus(numbers: Iterable[int]) -> dict[str, str]:
    """The environment of a process that sees these GPUs, beside what this process has allocated."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(d.local_hardware_id) for d in jax.devices()]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers),
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
