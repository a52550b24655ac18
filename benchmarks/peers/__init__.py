"""What others offer for the same layers and ops, measured for comparison.

PyTorch runs one process per GPU, so `torch_stack` starts it beside this one and reads what it
wrote. Nothing here imports PyTorch, and the processes it starts do not import JAX.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

PEERS = ("torch", "torch_async_tp")
VARIANTS = ("eager", "CUDA graph", "compiled")

#: NVLink multicast can take the GPUs of a shared host out of service.
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}

#: To start PyTorch and NCCL, and to end a case that has begun.
_GRACE_SECONDS = 60.0


class PeerCase(Protocol):
    """A dataclass: layers in a `direction`, or as many single ops of one name, `op`.

    Its `shape` is a dataclass of their global sizes, with a name.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Any: ...
    @property
    def layers(self) -> int: ...
    @property
    def divided_sizes(self) -> dict[str, int]: ...


@dataclass
class PeerRun:
    """What was measured, and why that is not everything, if so.

    Each result holds: peer, name, direction or op, shape, rows, features, hidden_features, layers,
    devices, dtype, versions; options (the variant that was fastest), tried (seconds per call of
    each in a short trial), samples (seconds per call, one for each group), milliseconds (median,
    q1, q3), relative_error (of results and gradients, the largest over arrays and devices); or
    failure.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None


def torch_stack(
    cases: Sequence[PeerCase],
    *,
    devices: int,
    peers: Sequence[str] = PEERS,
    variants: Sequence[str] = ("eager", "CUDA graph"),
    platform: Literal["gpu", "cpu"] = "gpu",
    dtype: str = "bfloat16",
    groups: int = 7,
    group_seconds: float = 0.05,
    limit_seconds: float = 90.0,
) -> PeerRun:
    """Times PyTorch on stacks of layers or of single ops, a process per device.

    The GPUs are shared with this process, which must not use them meanwhile and must have left
    PyTorch some 20 GB of their memory.

    Args:
      cases: what to time.
      devices: processes, each with its own GPU, or CPU cores.
      peers: "torch" gathers and scatters with NCCL, "torch_async_tp" with the fused operators of
        PyTorch's async tensor parallelism.
      variants: how each runs: "eager", "CUDA graph", "compiled" (torch.compile on a layer or an
        op); the fastest counts.
      platform: cpu shows that it runs; its times mean nothing, and async TP cannot run there.
      dtype: of all arrays.
      groups: timed groups; in each, the peers take turns.
      group_seconds: how long each peer is timed in a group, after half as long untimed.
      limit_seconds: no further case begins after this many seconds.

    Raises:
      ValueError: for unknown peers or variants, and for sizes that the devices do not divide.
    """
    _check(cases, devices, peers, variants)
    if importlib.util.find_spec("torch") is None:
        return PeerRun(reason="PyTorch is not installed")
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.json"), Path(folder, "results.json")
        settings = {
            "cases": [_flat(case) for case in cases],
            "devices": devices,
            "peers": list(peers),
            "variants": list(variants),
            "platform": platform,
            "dtype": dtype,
            "groups": groups,
            "group_seconds": group_seconds,
            "limit_seconds": limit_seconds,
            "output": str(output),
        }
        job.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "benchmarks.peers.torch_tensor_parallel", str(job)]
        reason = _run(command, limit_seconds + _GRACE_SECONDS)
        results = json.loads(output.read_text()) if output.exists() else []
        return PeerRun(results, reason)


def _check(
    cases: Sequence[PeerCase], devices: int, peers: Sequence[str], variants: Sequence[str]
) -> None:
    for argument, names, known in (("peers", peers, PEERS), ("variants", variants, VARIANTS)):
        if not names or not set(names) <= set(known):
            raise ValueError(f"{argument}={list(names)}: expected some of {', '.join(known)}")
    for case in cases:
        if reason := undivided(case, devices):
            raise ValueError(reason)


def undivided(case: PeerCase, devices: int) -> str | None:
    """Why so many devices cannot share a case, or None."""
    for name, size in case.divided_sizes.items():
        if devices < 1 or size % devices:
            return (
                f"devices={devices}: does not divide {name}={size} of {case.name!r}; "
                "choose other shapes or devices"
            )
    return None


def _flat(case: PeerCase) -> dict[str, Any]:
    content = asdict(case)
    sizes = content.pop("shape")
    return {"name": case.name, **content, "shape": sizes.pop("name"), **sizes}


def _run(command: list[str], timeout: float) -> str | None:
    """Runs it with all the processes that it starts; why it failed, or None."""
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **MULTICAST_OFF},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"PyTorch was stopped after {timeout:g} seconds"
        finally:
            # A device's process would wait for ever for one that has died.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return None
    print(errors, file=sys.stderr, flush=True)
    lines = errors.strip().splitlines() or ["it said nothing"]
    # Below an error of CUDA stands how to debug it.
    last = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
    return f"PyTorch failed with exit status {process.returncode}: {last}"
