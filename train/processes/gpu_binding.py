"""Which GPUs of its node each of several processes drives.

Processes that see the same GPUs share them evenly. What they see is found without CUDA, so that a
process can be bound to its share before JAX opens it.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

_OWN_CHOICE = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES")


class VisibleGpu(NamedTuple):
    """A GPU, or a MIG device, that CUDA shows to a process.

    Attributes:
      entry: its name for this process, in CUDA_VISIBLE_DEVICES.
      name: its name for all processes: the UUID, or the node and the file of the device.
    """

    entry: str
    name: str


class InstalledGpu(NamedTuple):
    """A GPU that a process may open.

    Attributes:
      name: as `VisibleGpu.name`.
      mig_devices: names of its MIG devices, which take its place.
    """

    name: str
    mig_devices: tuple[str, ...] = ()


class View(NamedTuple):
    """A process's description of its GPUs.

    Attributes:
      names: those that it sees.
      bound: whether JAX_LOCAL_DEVICE_IDS has chosen them.
    """

    names: Sequence[str] = ()
    bound: bool = False


def jax_uses_gpus(platforms: str | None) -> bool:
    """Whether JAX would open NVIDIA GPUs, with these platforms, as in ``JAX_PLATFORMS``."""
    if platforms:
        return not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def installed_gpus() -> list[InstalledGpu]:
    """The GPUs that this process may open, in the order of the PCI bus.

    Raises:
      ValueError: the driver does not answer.
    """
    try:
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(
            "nvidia-smi -L: no answer from the NVIDIA driver in 120 seconds; check the driver of"
            " this node"
        ) from None
    except OSError:
        return _device_files()
    return parse_list(listed.stdout) or _device_files()


def parse_list(text: str) -> list[InstalledGpu]:
    """The GPUs that ``nvidia-smi -L`` prints."""
    gpus: list[InstalledGpu] = []
    for mig, name in re.findall(r"^(\s*MIG )?.*\(UUID: (\S+)\)", text, re.MULTILINE):
        if mig and gpus:
            gpus[-1] = gpus[-1]._replace(mig_devices=(*gpus[-1].mig_devices, name))
        else:
            gpus.append(InstalledGpu(name))
    return gpus


def _device_files(folder: Path = Path("/dev")) -> list[InstalledGpu]:
    files = [path for path in folder.glob("nvidia*") if path.name[6:].isdigit()]
    ordered = sorted(files, key=lambda path: int(path.name[6:]))
    return [InstalledGpu(f"{_node()}{path}") for path in ordered if _can_open(path)]


def _node() -> str:
    """A name of this node, the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _can_open(path: Path) -> bool:
    """Whether the control group of this process allows it, as CUDA asks."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def visible_gpus(
    variables: Mapping[str, str], installed: Sequence[InstalledGpu]
) -> list[VisibleGpu]:
    """The GPUs that CUDA shows to this process, in its order."""
    value = variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [gpu for number in range(len(installed)) for gpu in _find(str(number), installed)]
    seen: list[VisibleGpu] = []
    for entry in value.split(","):
        found = _find(entry.strip(), installed)
        if not found:
            break  # CUDA ignores what follows a name that it does not know.
        seen += found
    return seen


def _find(entry: str, installed: Sequence[InstalledGpu]) -> list[VisibleGpu]:
    """Finds the GPU that an entry of CUDA_VISIBLE_DEVICES names; a UUID may be cut off."""
    if entry.isdecimal():
        gpus = installed[int(entry) : int(entry) + 1]
    elif not entry.startswith(("GPU-", "MIG-")):
        return []
    elif not any(gpu.name.startswith("GPU-") for gpu in installed):
        return [VisibleGpu(entry, entry)]  # Only files are known.
    elif entry.startswith("MIG-"):
        names = [name for gpu in installed for name in gpu.mig_devices]
        return [VisibleGpu(entry, name) for name in names if name.startswith(entry)][:1]
    else:
        gpus = [gpu for gpu in installed if gpu.name.startswith(entry)][:1]
    if gpus and gpus[0].mig_devices:
        return [VisibleGpu(name, name) for name in gpus[0].mig_devices]
    return [VisibleGpu(entry, gpu.name) for gpu in gpus]


def view(variables: Mapping[str, str], seen: Sequence[VisibleGpu]) -> View:
    """Returns what this process says of the GPUs that it sees.

    Raises:
      ValueError: a variable of JAX names GPUs that it does not see.
    """
    names = [gpu.name for gpu in seen]
    for variable in _OWN_CHOICE:
        value = variables.get(variable, "")
        if value in ("", "all"):
            continue
        numbers = [int(n) if n.strip().isdecimal() else -1 for n in value.split(",")]
        if not all(0 <= number < len(names) for number in numbers):
            raise ValueError(
                f"{variable}={value!r}: expected numbers of GPUs, separated by commas; this process"
                f" sees {_count(len(names))}, numbered from 0"
            )
        return View([names[number] for number in numbers], bound=True)
    return View(names)


def own_share(views: Sequence[View], process: int, seen: Sequence[VisibleGpu]) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES for the GPUs that a process takes; empty for all of them.

    A process that sees GPUs that no other one sees takes all of them.

    Args:
      views: what each process says.
      process: its number.
      seen: the GPUs that it sees.

    Raises:
      ValueError: GPUs cannot be shared evenly, on any node. All processes raise the same.
    """
    users = defaultdict(set)
    for number, told in enumerate(views):
        for name in told.names:
            users[name].add(number)
    sharing = [sorted({n for name in told.names for n in users[name]}) for told in views]
    for numbers in sharing:
        if len(numbers) > 1:
            _check_divisible([views[number] for number in numbers], numbers)
    mine = sharing[process]
    if len(mine) <= 1:
        return []
    # The order is that of one of them: CUDA_VISIBLE_DEVICES may list the same GPUs in another.
    names, entries = views[mine[0]].names, {gpu.name: gpu.entry for gpu in seen}
    share = _share(names, len(mine))
    first = mine.index(process) * share
    return [entries[name] for name in names[first : first + share]]


def _share(names: Sequence[str], processes: int) -> int:
    """GPUs per process; 0 if they cannot be shared evenly. CUDA shows a process one MIG device."""
    if all(name.startswith("MIG-") for name in names):
        return int(processes <= len(names))
    return 0 if len(names) % processes else len(names) // processes


def _check_divisible(views: Sequence[View], numbers: Sequence[int]) -> None:
    who = f"processes {', '.join(map(str, numbers))}"
    for other, number in zip(views[1:], numbers[1:], strict=True):
        both = sorted(set(views[0].names) & set(other.names))
        if views[0].bound or other.bound or set(views[0].names) != set(other.names):
            which = f"both use {both[0]}" if both else "use some of the same GPUs"
            raise ValueError(
                f"processes {numbers[0]} and {number} {which}; let all processes of a node see the"
                " same GPUs, which they share evenly, or give each its own, in CUDA_VISIBLE_DEVICES"
                " or JAX_LOCAL_DEVICE_IDS"
            )
    if not _share(views[0].names, len(numbers)):
        raise ValueError(
            f"{who} are on a node where they see the same {_count(len(views[0].names))}, which"
            f" {len(numbers)} processes cannot share evenly; start one process per node, which"
            " drives all of them, or a number of processes that divides them"
        )


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"
