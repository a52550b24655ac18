"""What Slurm, Open MPI and Kubernetes tell a process about the run that it is part of.

Reads environment variables alone: nothing here connects to anything, or imports JAX.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


class Placement(NamedTuple):
    """The place of this process among those of a run.

    Attributes:
      launcher: what started it.
      num_processes: processes of the run; None if only Kubernetes' API server knows.
      process_id: the number of this one.
      local_id: its number among those of its node.
      local_processes: processes of its node.
    """

    launcher: str
    num_processes: int | None
    process_id: int
    local_id: int = 0
    local_processes: int = 1


def find_placement(variables: Mapping[str, str] = os.environ) -> Placement | None:
    """The placement that a launcher describes, or None for a process of its own.

    A script of sbatch without srun, a single task of srun and a pod that is not of an indexed Job
    are processes of their own.
    """
    placement = None
    if all(name in variables for name in _SLURM):
        placement = _slurm(variables)
    elif all(name in variables for name in _OPEN_MPI):
        size, rank, local_rank = (int(variables[name]) for name in _OPEN_MPI)
        local_size = int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", local_rank + 1))
        placement = Placement("Open MPI", size, rank, local_rank, local_size)
    elif all(name in variables for name in _KUBERNETES) and importlib.util.find_spec("kubernetes"):
        # Without the package, JAX cannot ask for the number of pods.
        placement = Placement("Kubernetes", None, int(variables["JOB_COMPLETION_INDEX"]))
    return None if placement is None or placement.num_processes == 1 else placement


def _slurm(variables: Mapping[str, str]) -> Placement:
    # The variables with STEP count the tasks of this srun, the others may count those of the job.
    count = int(variables.get("SLURM_STEP_NUM_TASKS", variables["SLURM_NTASKS"]))
    local_id = int(variables["SLURM_LOCALID"])
    per_node = variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", ""))
    # "2(x3),1" are 2 tasks on each of 3 nodes and 1 on the last.
    counts = [
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        for _ in range(int(times or 1))
    ]
    node = int(variables.get("SLURM_NODEID", 0))
    local_processes = counts[node] if node < len(counts) else local_id + 1
    return Placement("Slurm", count, int(variables["SLURM_PROCID"]), local_id, local_processes)


def local_device_ids(
    placement: Placement, variables: Mapping[str, str] = os.environ, gpus: int | None = None
) -> Sequence[int]:
    """The GPUs that this process takes of those that it sees; empty for all of them.

    One process per node takes all. Several share what they see evenly, unless the launcher has
    bound each to its own.

    Args:
      placement: the place of this process.
      variables: the environment.
      gpus: number of GPUs that the process sees; None counts them.

    Raises:
      ValueError: the GPUs cannot be shared evenly.
    """
    if placement.local_processes == 1 or _is_bound(variables):
        return ()
    seen = _visible_gpus(variables) if gpus is None else gpus
    # Simulated devices are not shared. A process that sees one GPU has got its own.
    if seen <= 1:
        return ()
    share, rest = divmod(seen, placement.local_processes)
    if rest:
        raise ValueError(
            f"{placement.launcher} started {placement.local_processes} processes on this node,"
            f" which has {seen} GPUs; start one process per node, which drives all of them, or a"
            " number of processes that divides them"
        )
    return range(placement.local_id * share, (placement.local_id + 1) * share)


def _is_bound(variables: Mapping[str, str]) -> bool:
    """Whether Slurm gives each task GPUs of its own."""
    return "SLURM_GPUS_PER_TASK" in variables or "SLURM_GPU_BIND" in variables


def _visible_gpus(variables: Mapping[str, str]) -> int:
    if "CUDA_VISIBLE_DEVICES" in variables:
        return len([gpu for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
