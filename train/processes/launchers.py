"""Launchers: how Slurm, Open MPI and Kubernetes tell a process about its run.

Reads environment variables alone: nothing here connects to anything, or imports JAX.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
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
    """

    launcher: str
    num_processes: int | None
    process_id: int


def find_placement(variables: Mapping[str, str] = os.environ) -> Placement | None:
    """The placement that a launcher describes, or None for a process of its own.

    A script of sbatch without srun, a single task of srun and a pod that is not of an indexed Job
    are processes of their own.
    """
    placement = None
    if all(name in variables for name in _SLURM):
        # The variable with STEP counts the tasks of this srun, the other may count the job's.
        count = int(variables.get("SLURM_STEP_NUM_TASKS", variables["SLURM_NTASKS"]))
        placement = Placement("Slurm", count, int(variables["SLURM_PROCID"]))
    elif all(name in variables for name in _OPEN_MPI):
        size, rank, _ = (int(variables[name]) for name in _OPEN_MPI)
        placement = Placement("Open MPI", size, rank)
    elif all(name in variables for name in _KUBERNETES) and importlib.util.find_spec("kubernetes"):
        # Without the package, JAX cannot ask for the number of pods.
        placement = Placement("Kubernetes", None, int(variables["JOB_COMPLETION_INDEX"]))
    return None if placement is None or placement.num_processes == 1 else placement
