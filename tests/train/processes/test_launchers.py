"""Launchers are recognised by recorded environments, without a network; a run of one connects to
nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from train import _compat
from train.config.config import DistributedConfig, MeshSizes
from train.parallel.mesh import make_mesh
from train.processes.agreement import AgreedError
from train.processes.connection import check_mesh, connected
from train.processes.gpu_binding import InstalledGpu
from train.processes.launchers import Placement, find_placement

# Two nodes with one task each: `srun --nodes 2 --ntasks-per-node 1`, on the second node.
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# The same nodes with `--ntasks-per-node 8`; the sixth task of the second node.
SLURM_PER_GPU = SLURM | {
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
# `mpirun --map-by ppr:1:node` of Open MPI 4, on the first node.
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
# The third pod of an indexed Job.
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-2",
}
VISIBLE = "CUDA_VISIBLE_DEVICES"
LAUNCHED = sorted({*SLURM, *OPEN_MPI, *KUBERNETES})


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*LAUNCHED, "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS", VISIBLE):
        monkeypatch.setenv(name, "")  # So that what the code sets is undone.
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def connection(no_launcher: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Records what JAX, which is otherwise its own, would tell its coordination service.

    Other processes say what "others" has, or that they have no GPUs.
    """
    made: dict[str, Any] = {"others": {}}

    def client(address: str, process_id: int, **_: Any) -> Any:
        made.update(address=address, process_id=process_id)
        told: dict[int, str] = made["others"]
        return types.SimpleNamespace(
            connect=lambda: None,
            shutdown=lambda: None,
            key_value_set=lambda key, text: told.__setitem__(int(key.rpartition("/")[2]), text),
            wait_at_barrier=lambda *_: None,
            key_value_dir_get=lambda key: [(f"{key}{n}", told.get(n, "{}")) for n in range(16)],
        )

    def service(address: str, num_processes: int, **_: Any) -> Any:
        made.update(service=address)
        return types.SimpleNamespace(shutdown=lambda: None)

    runtime = types.SimpleNamespace(
        get_distributed_runtime_client=client, get_distributed_runtime_service=service
    )
    names = jax.distributed.initialize.__globals__
    no_launcher.setitem(names, "_jax", runtime)
    no_launcher.setitem(
        names, "xla_bridge", types.SimpleNamespace(backends_are_initialized=lambda: False)
    )
    state = type(names["global_state"])()
    no_launcher.setitem(names, "global_state", state)
    no_launcher.setattr(_compat, "global_state", state)
    made["state"] = state
    settings = ("jax_cuda_visible_devices", "jax_enable_preemption_service")
    before = {name: jax.config.values[name] for name in settings}
    yield made
    for name, value in before.items():
        jax.config.update(name, value)


def connect(config: DistributedConfig = DistributedConfig()) -> None:  # noqa: B008
    with connected(config):
        pass


def test_a_run_of_one_process_connects_to_nothing(no_launcher, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("connects")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    # In a script of sbatch, without srun; a task of its own; a pod that is not of an indexed Job.
    batch = {n: v for n, v in SLURM.items() if "STEP" not in n}
    alone = SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    pod = {n: v for n, v in KUBERNETES.items() if n != "JOB_COMPLETION_INDEX"}
    for variables in ({}, batch, alone, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, pod):
        with monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            connect()
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    connect(DistributedConfig(num_processes=1))
    # The refusal is met where there is something to connect to.
    with pytest.raises(AssertionError, match="connects"):
        connect()


def test_slurm_with_one_task_per_node_drives_all_its_gpus(connection, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    connect()
    # JAX's port for job 4242.
    assert (connection["address"], connection["process_id"]) == ("gpu007:61586", 1)
    assert connection["state"].num_processes == 2
    assert not jax.config.values["jax_cuda_visible_devices"] or (
        jax.config.values["jax_cuda_visible_devices"] == "all"
    )


def test_slurm_with_a_task_per_gpu_shares_those_of_the_node(connection, monkeypatch):
    for name, value in SLURM_PER_GPU.items():
        monkeypatch.setenv(name, value)
    see_gpus(monkeypatch, 8)
    neighbours = json.dumps({"names": [f"GPU-{number}" for number in range(8)], "bound": False})
    elsewhere = json.dumps({"names": [f"GPU-other-{number}" for number in range(8)]})
    connection["others"] |= {
        number: neighbours if number >= 8 else elsewhere for number in range(16)
    }
    connect()
    assert connection["process_id"] == 13
    assert connection["state"].num_processes == 16
    assert os.environ[VISIBLE] == "5"


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Lets this process see GPUs, which JAX would use."""
    installed = [InstalledGpu(f"GPU-{number}") for number in range(count)]
    monkeypatch.setattr("train.processes.connection.jax_uses_gpus", lambda _: True)
    monkeypatch.setattr("train.processes.connection.installed_gpus", lambda: installed)


def test_two_processes_by_hand_share_the_gpus_of_their_node(connection, monkeypatch):
    see_gpus(monkeypatch, 4)
    flags = DistributedConfig("host:1234", 2, 1)
    connection["others"][0] = json.dumps({"names": [f"GPU-{n}" for n in range(4)]})
    connect(flags)
    assert os.environ[VISIBLE] == "2,3"


def test_processes_that_cannot_share_gpus_refuse_together(connection, monkeypatch):
    see_gpus(monkeypatch, 3)
    flags = DistributedConfig("host:1234", 2, 1)
    connection["others"][0] = json.dumps({"names": [f"GPU-{n}" for n in range(3)]})
    with pytest.raises(AgreedError, match="see the same 3 GPUs, which 2 processes cannot"):
        connect(flags)
    assert VISIBLE not in os.environ


def test_a_process_that_cannot_find_its_gpus_ends_all(connection, monkeypatch):
    see_gpus(monkeypatch, 2)
    connection["others"][0] = json.dumps({"refused": "nvidia-smi -L: no answer"})
    with pytest.raises(AgreedError, match=r"^process 0: nvidia-smi -L: no answer"):
        connect(DistributedConfig("host:1234", 2, 1))


def test_open_mpi(connection, monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    connect()
    # JAX's port for the job's number.
    port = 1531576320 // 2**12 % 2**12 + 65535 - 2**12 + 1
    assert (connection["address"], connection["process_id"]) == (f"10.96.0.1:{port}", 0)
    assert connection["service"].endswith(f":{port}")
    assert connection["state"].num_processes == 2


def test_open_mpi_5_needs_an_address_alone(connection, monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    # Where it is installed, JAX asks it for the address.
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match=r"^Open MPI: JAX cannot find .*--distributed\."):
        connect()
    connect(DistributedConfig(coordinator_address="first:1234"))
    assert (connection["address"], connection["process_id"]) == ("first:1234", 1)


def fake_kubernetes(pods: int) -> types.ModuleType:
    """The answers of an API server about an indexed Job with a headless service."""
    record = types.SimpleNamespace
    job = record(metadata=record(name="train", labels={}), spec=record(parallelism=pods))
    pod = record(
        metadata=record(
            name="train-2",
            labels={"job-name": "train"},
            owner_references=[record(controller=True, kind="Job")],
        ),
        spec=record(subdomain="workers"),
    )
    core = record(list_namespaced_pod=lambda **_: record(items=[pod]))
    batch = record(read_namespaced_job=lambda **_: job)
    package: Any = types.ModuleType("kubernetes")
    package.__spec__ = record(name="kubernetes")
    package.config = record(load_incluster_config=lambda: None)
    package.client = record(
        CoreV1Api=lambda: core,
        BatchV1Api=lambda: batch,
        exceptions=record(ApiException=type("ApiException", (Exception,), {})),
    )
    return package


def test_kubernetes(connection, monkeypatch):
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
    # Without the package nothing can be asked: a run of its own.
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with contextlib.suppress(ValueError):
        assert find_placement(KUBERNETES) is None
    monkeypatch.setitem(sys.modules, "kubernetes", fake_kubernetes(4))
    cluster = next(
        kind
        for kind in jax.distributed.initialize.__globals__["clusters"].ClusterEnv._cluster_types
        if kind.__name__ == "K8sCluster"
    )
    monkeypatch.setattr(cluster, "_namespace", lambda: "default")
    monkeypatch.setattr("socket.gethostbyname", lambda _: "10.0.0.7")
    monkeypatch.setattr("time.sleep", lambda _: None)
    connect()
    assert (connection["address"], connection["process_id"]) == ("train-0.workers:55527", 2)
    assert connection["state"].num_processes == 4


def test_a_mesh_that_leaves_out_devices_of_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    sentence = (
        r"mesh\.data=1 × mesh\.fsdp=1 × mesh\.tensor=2: has 2 of 8 devices; with several processes,"
        r" expected a mesh of all; let a size be 0 for what fits, or start fewer processes"
    )
    with pytest.raises(ValueError, match=sentence):
        check_mesh(make_mesh(MeshSizes(tensor=2)), across=False)


def test_slurm_counts_the_tasks_of_the_step():
    placement = find_placement(SLURM | {"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "5"})
    assert placement == Placement("Slurm", 5, 1)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (DistributedConfig(num_processes=2), "give all three"),
        (DistributedConfig("host:1", 2), "give all three"),
        (DistributedConfig("host", 2, 0), "'host': expected HOST:PORT"),
        (DistributedConfig("host:1", 2, 2), "process_id=2: expected 0 to 1"),
        (DistributedConfig("host:1", 2, 0, heartbeat_timeout_seconds=0), "at least 1"),
    ],
)
def test_incomplete_or_impossible_flags_are_refused(no_launcher, config, sentence):
    with pytest.raises(ValueError, match=rf"distributed\..*{sentence}"):
        connect(config)
