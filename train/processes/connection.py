"""Several processes that train together, through `jax.distributed`.

Each process drives the devices of its node and runs the same program. Process 0 prints and logs.
All functions also work for a run of one process, which connects to nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from train._compat import exchange, process_id
from train.config.config import DistributedConfig
from train.config.counts import counted
from train.processes.agreement import AgreedError, is_agreed
from train.processes.gpu_binding import (
    View,
    installed_gpus,
    jax_uses_gpus,
    own_share,
    view,
    visible_gpus,
)
from train.processes.launchers import Placement, find_placement
from train.processes.supervisor import RESUME

_FLAGS = "--distributed.coordinator-address, --distributed.num-processes, --distributed.process-id"


def is_told_elsewhere(error: BaseException) -> bool:
    """Whether process 0 prints this error, and this process does not."""
    return is_agreed(error) and jax.distributed.is_initialized() and not is_first()


def own_name(error: BaseException) -> str:
    """The beginning of an error that only this one of several processes has; "" otherwise."""
    if is_agreed(error) or not jax.distributed.is_initialized():
        return ""
    return f"process {process_id()}: "


def is_first() -> bool:
    """Whether this is the process that prints and logs. Opens no device."""
    return process_id() == 0


@contextlib.contextmanager
def connected(config: DistributedConfig) -> Iterator[None]:
    """Connects the processes of a run. A process of its own connects to nothing.

    A process that leaves alone, with an error that the others do not have, ends at once. Else it
    would wait for them, and they for it.

    Raises:
      ValueError: the flags are not complete, JAX cannot find the other processes, or those of a
        node cannot share its GPUs evenly.
    """
    placement = find_run(config, os.environ)
    if placement is None:
        yield
        return
    _initialize(config, placement)
    try:
        _bind_gpus()
        yield
    except BaseException as error:
        leaving = isinstance(error, SystemExit)
        if not is_agreed(error.__context__ if leaving else error):
            if isinstance(error, jax.errors.JaxRuntimeError):
                _print_failure(error)
            elif not leaving:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.code if leaving and isinstance(error.code, int) else 1)
        raise


def _print_failure(error: BaseException) -> None:
    """Says that a program failed, which also happens where another process has died in it."""
    print(
        f"error: process {process_id()}: a program failed ({' '.join(str(error).split())});"
        f" if another process has died, {RESUME}",
        file=sys.stderr,
    )


def find_run(config: DistributedConfig, variables: Mapping[str, str]) -> Placement | None:
    """The place of this process by its flags and its launcher; None for a run of one process.

    Raises:
      ValueError: there are flags for it, but not all that are needed, or impossible ones.
    """
    if config.num_processes == 1:
        return None
    found = find_placement(variables)
    given = (config.coordinator_address, config.num_processes, config.process_id)
    if found is None:
        if given == (None, None, None):
            return None
        address, count, number = given
        if address is None or count is None or number is None:
            raise ValueError(
                f"{_FLAGS}: give all three, since neither Slurm nor Open MPI nor Kubernetes has"
                " started this process; or none, for a run of one process"
            )
        found = Placement("flags", count, number)
    if config.heartbeat_timeout_seconds < 1:
        raise ValueError(
            f"distributed.heartbeat_timeout_seconds={config.heartbeat_timeout_seconds}: expected at"
            " least 1"
        )
    count = found.num_processes if config.num_processes is None else config.num_processes
    number = found.process_id if config.process_id is None else config.process_id
    if config.coordinator_address is not None and ":" not in config.coordinator_address:
        raise ValueError(
            f"distributed.coordinator_address={config.coordinator_address!r}: expected HOST:PORT,"
            " a host that runs process 0 and a port that is free there"
        )
    if count is not None and (count < 1 or not 0 <= number < count):
        raise ValueError(
            f"distributed.process_id={number}: expected 0 to {count - 1}, for"
            f" distributed.num_processes={count}"
        )
    return found._replace(num_processes=count, process_id=number)


def _initialize(config: DistributedConfig, placement: Placement) -> None:
    if config.coordinator_address is not None and placement.process_id == 0:
        _check_port(config.coordinator_address)
    # Else JAX replaces the handler of SIGTERM, which is `Shutdown`'s.
    jax.config.update("jax_enable_preemption_service", False)
    # Where JAX is given none, it takes one GPU per process under Slurm and Open MPI; an empty list
    # takes all that are visible, see `_bind_gpus`.
    own_choice = "JAX_LOCAL_DEVICE_IDS" in os.environ
    try:
        jax.distributed.initialize(
            config.coordinator_address,
            placement.num_processes,
            placement.process_id,
            local_device_ids=None if own_choice else [],
            heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{placement.launcher}: JAX cannot find the other processes"
            f" ({' '.join(str(error).split())}); give {_FLAGS}, or --distributed.num-processes 1"
            " for a run of one process"
        ) from error


def _bind_gpus() -> None:
    """Lets this process see its share of the GPUs that several see. Call it before JAX opens them.

    Raises:
      AgreedError: they cannot share them evenly, or one of them cannot find its GPUs.
    """
    seen, own = [], {}
    try:
        if jax_uses_gpus(jax.config.values["jax_platforms"]):
            seen = visible_gpus(os.environ, installed_gpus())
            own = view(os.environ, seen)._asdict()
    except ValueError as error:
        own = {"refused": str(error)}
    told = exchange(own)
    for number, what in enumerate(told):
        if "refused" in what:
            raise AgreedError(f"process {number}: {what['refused']}")
    try:
        entries = own_share([View(**what) for what in told], process_id(), seen)
    except ValueError as error:
        raise AgreedError(str(error)) from error
    if entries:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(entries)


def _check_port(address: str) -> None:
    """Refuses a port that another program of this node listens at. JAX 0.10 crashes there."""
    port = address.rpartition(":")[2]
    with socket.socket() as probe:
        # As the coordination service will open it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError, ValueError) as error:
            raise ValueError(
                f"distributed.coordinator_address={address!r}: process 0 cannot listen at its port"
                f" ({error}); give the port of a host that runs process 0, and that is free there"
            ) from None


def describe_processes() -> list[str]:
    """How many processes there are, and what that means for overlap; nothing for one."""
    count, devices = jax.process_count(), jax.local_device_count()
    if count == 1:
        return []
    if devices > 1:
        return [f"processes: {count}, with {counted(devices, 'device')} each"]
    return [
        f"processes: {count}, with one device each; rings between them go through NCCL, where they"
        " overlap with nothing; on Hopper GPUs of one node, kernels that address peers' memory"
        " replace them where they are faster"
    ]


def check_mesh(mesh: Mesh, across: bool) -> None:
    """Checks that a mesh has all devices, and where its tensor axis is.

    Args:
      mesh: the mesh.
      across: whether the tensor axis may span processes.

    Raises:
      ValueError: some process has devices that are not in the mesh, or the tensor axis spans
        processes and may not.
    """
    if jax.process_count() == 1:
        return
    if mesh.size != jax.device_count():
        sizes = " × ".join(f"mesh.{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"{sizes}: has {mesh.size} of {jax.device_count()} devices; with several processes,"
            " expected a mesh of all; let a size be 0 for what fits, or start fewer processes"
        )
    tensor = mesh.axis_names.index("tensor")
    groups = np.moveaxis(mesh.devices, tensor, -1).reshape(-1, mesh.shape["tensor"])
    if not across and any(len({d.process_index for d in group}) > 1 for group in groups):
        raise ValueError(
            f"mesh.tensor={mesh.shape['tensor']}: the tensor axis would span processes of"
            f" {jax.local_device_count()} devices, where rings cannot overlap; give a --mesh.tensor"
            " that divides them, or --distributed.tensor-across-processes if that is what you want:"
            " kernels that address peers' memory replace rings on Hopper GPUs of one node"
        )
