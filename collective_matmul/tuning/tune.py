"""`tune`: measures sites with every backend and saves the table for later decisions."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from collective_matmul.agreement import of_first_process
from collective_matmul.data import Run
from collective_matmul.dispatch.assessment import unsupported_reason
from collective_matmul.dispatch.contract import COMPUTE_ONLY, Request
from collective_matmul.dispatch.recording import decisions_of
from collective_matmul.dispatch.registry import OPS, REFERENCE, current_name
from collective_matmul.dispatch.tables import table_files
from collective_matmul.dispatch.tables.table import Entry, Table
from collective_matmul.dispatch.tables.table_files import (
    CACHE_VARIABLE,
    cache_path,
    file_name,
    writable_path,
)
from collective_matmul.hardware import how_to_simulate
from collective_matmul.jit.compiler import OverlapJit
from collective_matmul.jit.graph_functions import explaining_arguments
from collective_matmul.peer_access import peer_kernels_allowed
from collective_matmul.transport import Transport, transport_between
from collective_matmul.tuning.timing import measure
from collective_matmul.tuning.trials import Measure, Trial, trials

#: 56 sites took 80 to 95 s on 2 H200 (benchmarks/reports/2026-11-25-train-8b-2-h200.md).
_SECONDS_OF_A_SITE = 1.6


def tune(
    target: Callable | Iterable[Request],
    *args: Any,
    devices: Sequence[Any] | None = None,
    implementations: Sequence[str] | None = None,
    path: str | os.PathLike | None = None,
    groups: int = 5,
    seconds_per_group: float = 0.05,
    limit_seconds: float = math.inf,
    again: bool = False,
) -> Table:
    """Measures collective matmuls on the devices here, so that the fastest backend is chosen.

    ``tune(fun, *args)`` traces a function, as `explain` does, and measures every collective
    matmul in it, including those of gradients if the function takes gradients. These are ops
    that it calls, in layers or by itself, and those that `overlap` puts in place of its gathers
    and sums. Each is measured in a program that repeats it, with the backends in turns. This
    takes seconds for each, mostly to compile, and prints its progress. Every result is saved at
    once: an interrupted call loses nothing and can be repeated. Ops on operands in 8 bits are
    measured on such operands, and decide about ops whose operands are stored alike. Einsums
    that are not matmuls are left out, and so are ops that gather their weights over a second
    mesh axis in the same loop; the cost model decides about them.

    Several processes tune together: each calls this with the same arguments, for sites of as many
    devices as all processes have. All keep the times of process 0, each in its own file if they
    share none.

    The table takes effect in every process of this user, for functions traced afterwards. A
    function that `jax.jit` has already compiled does not change.

    Args:
      target: a function, jitted or not, also one of `overlap_jit`; or sites to measure, such as
        those of an `Explanation`'s decisions.
      *args: arguments of the function, or their `jax.ShapeDtypeStruct`; Flax nnx objects too.
      devices: devices of one kind; a site on an axis of size D is measured on the first D. Default:
        all devices of JAX's default backend.
      implementations: names of backends; default: all. The reference is always measured too.
      path: file of the table; default: the file for this kind of device in the user's cache, which
        decisions read.
      groups: number of timed groups; the median counts. In each group, backends take turns.
      seconds_per_group: how long to time one backend in one group.
      limit_seconds: no site is started after this many seconds.
      again: whether to measure sites that the table has from this version of JAX.

    Returns:
      The table at `path`, including its earlier entries.

    Raises:
      TypeError: for arguments that the function does not take.
      ValueError: for a target of another kind, unknown names, a function without collective
        matmuls, or for devices that its mesh describes and that are not here, arguments without a
        function, fewer devices than a site has, devices of different kinds or descriptions of some,
        a table at `path` for another kind, sites of other than all devices of several processes,
        numbers that do not allow a measurement, a folder that cannot be written, or devices that
        are no GPUs while neither `path` nor the environment names a place for their table.
      OSError: if the table cannot be written after all.
    """
    if not limit_seconds > 0:
        raise ValueError(f"limit_seconds={limit_seconds}: expected more than 0")
    timed = functools.partial(measure, seconds_per_group=seconds_per_group)
    timed({}, groups=groups)  # Refuses bad settings before anything is compiled.
    known = dict.fromkeys(name for op in OPS.values() for name in op.backends)
    names = tuple(known if implementations is None else map(current_name, implementations))
    found = _measured_devices(devices)
    kind = found[0].device_kind
    with peer_kernels_allowed(True):  # As in the programs that are timed.
        sites = _sites(target, args, kind)
    left_out = [site for site in sites if not site.is_tabled]
    sites = [site for site in sites if site.is_tabled]
    _check_names(names, known)
    _check(sites, found)
    # They are measured on these devices, whichever they were found on.
    sites = [_moved_by(transport_between(found), site) for site in sites]
    check_place(found[0], path)
    tuner = _Tuner(
        devices=found,
        implementations=tuple(dict.fromkeys((REFERENCE, *names))),
        path=writable_path(kind, path),
        measure=timed,
        groups=groups,
        limit_seconds=limit_seconds,
        run=_describe(found),
    )
    with peer_kernels_allowed(True):
        return tuner.tune(sites, again, left_out)


def estimated_seconds(sites: Collection[Request]) -> float:
    """About how long `tune` takes for sites, mostly to compile programs."""
    return _SECONDS_OF_A_SITE * len(sites)


def _measured_devices(devices: Any) -> list[Any]:
    """The devices to measure on: by default all.

    Raises:
      ValueError: unless they are devices, not a description of some, and of one kind.
    """
    found = jax.devices() if devices is None else devices
    if not isinstance(found, Iterable) or not all(isinstance(d, jax.Device) for d in found):
        raise ValueError(
            f"devices={devices!r}: expected devices to measure on, which a description is not; run"
            " this on the GPUs, with some of jax.devices(), or leave devices out to take them all"
        )
    kinds = {device.device_kind for device in found}
    if len(kinds) != 1:
        raise ValueError(f"devices: of kinds {sorted(kinds)}; expected at least one, all alike")
    return list(found)


def _sites(target: Callable | Iterable[Request], args: tuple, kind: str) -> list[Request]:
    if args and not callable(target):
        raise ValueError(f"args: {len(args)} beside sites; expected none, leave them out")
    found = _sites_in(target, args, kind) if callable(target) else _checked(target)
    distinct = dict.fromkeys(site.flat for site in found)
    return [site for site in distinct if site.communicates and site.flops > 0]


def _checked(sites: Any) -> list[Request]:
    """The sites of an iterable of nothing else."""
    fix = (
        "expected a function, with its arguments after it, or sites such as"
        " [each.site for each in explain(f)(*args).decisions]"
    )
    if not isinstance(sites, Iterable):
        raise ValueError(f"target: a {type(sites).__name__}; {fix}")
    found = list(sites)
    for each in found:
        if callable(each):
            raise ValueError(f"target: has the function {each!r}; {fix}; tune functions one by one")
        if not hasattr(each, "flat"):  # As each `Request` has.
            raise ValueError(f"target: has a {type(each).__name__}; {fix}")
    return found


def _moved_by(transport: Transport, site: Any) -> Request:
    """The site with a transport, which requests of further ops may do without."""
    has_one = "transport" in {each.name for each in dataclasses.fields(site)}
    return replace(site, transport=transport) if has_one else site


def _sites_in(fun: Callable, args: tuple, kind: str) -> list[Request]:
    traced, traced_args = fun, args
    if isinstance(fun, OverlapJit):
        traced, traced_args, _ = fun.uncompiled(args, {})
    with explaining_arguments("tune({}, *args)", fun, args, {}):
        decisions = decisions_of(traced, *traced_args)
    if not decisions:
        raise ValueError(
            f"target={fun!r}: calls no collective matmul; give a function that does. To measure the"
            " gathers and sums of a function f that calls none, give what replaces them:"
            " collective_matmul.overlap(f)"
        )
    for decision in decisions:
        _check_present(decision.device_kind, kind)
    return [decision.site for decision in decisions]


def _check_present(kind: str, present: str) -> None:
    """Refuses a function for devices of a kind that a mesh describes and that are not here."""
    if kind == present:
        return
    place = cache_path(kind) or f"{file_name(kind)} in a folder that {CACHE_VARIABLE} names"
    raise ValueError(
        f"target: its mesh describes {kind}, and there are none to measure on, only {present}; run"
        f" tune where they are, and copy the table that it saves there to {place} here, where"
        " decisions for the described mesh read it"
    )


def _check_names(names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            expected = ", ".join(known)
            raise ValueError(f"implementations: {name!r} is unknown; expected some of {expected}")


def _check(sites: Sequence[Request], devices: Sequence[Any]) -> None:
    for site in sites:
        if site.axis_size > len(devices):
            raise ValueError(
                f"devices: {len(devices)}, and {site} needs {site.axis_size}; give more, or leave"
                f" the site out (the command has --devices); {how_to_simulate(site.axis_size)}"
            )
        if jax.process_count() > 1 and site.axis_size != jax.device_count():
            raise ValueError(
                f"tune: {jax.process_count()} processes with {jax.device_count()} devices, and"
                f" {site} is of {site.axis_size}; every process takes part in a measurement: start"
                " as many processes as the site has devices, or leave it out"
            )


def check_place(
    device: Any, path: str | os.PathLike | None, advice: str = "give the table a path of its own"
) -> None:
    """Raises ValueError where times of a CPU would decide about this user's later programs.

    Args:
      device: one of those that are measured.
      path: the file of the table; None: that in the user's cache.
      advice: how the user gives it.
    """
    if device.platform == "gpu" or path is not None or os.environ.get(CACHE_VARIABLE):
        return
    raise ValueError(
        f"devices: no GPUs to measure on, only {device.device_kind}, where nothing runs under a"
        f" matmul; run this on the GPUs, or, to measure these and keep their times from later"
        f" programs, {advice} or set {CACHE_VARIABLE}"
    )


def _describe(devices: Sequence[Any]) -> Run:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"{len(devices)} × {devices[0].device_kind}"
    if jax.process_count() > 1:
        text += f", {jax.process_count()} processes"
    fields = "clocks.max.sm,clocks.max.mem,power.limit,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if devices[0].platform == "gpu":
        try:
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            sm, memory, power, driver = output.stdout.splitlines()[0].split(", ")
            text += f", up to {sm} (memory {memory}) and {power}, driver {driver}"
        except (OSError, ValueError, IndexError, subprocess.SubprocessError):
            text += ", clocks unknown"
    return Run(date=today, jax=jax.__version__, devices=text)


@dataclass(frozen=True)
class _Tuner:
    """Measures sites with the arguments of `tune`."""

    devices: Sequence[Any]
    implementations: tuple[str, ...]
    path: Path
    measure: Measure
    groups: int
    limit_seconds: float
    run: Run
    started: float = field(default_factory=lambda: time.monotonic())
    printed: set[str] = field(default_factory=set)

    def tune(self, sites: Sequence[Request], again: bool, left_out: Sequence[Request]) -> Table:
        present = table_files.read_users(self.path)
        known = {} if again or present is None else present.entries
        measured = [self._is_measured(site, known.get(site)) for site in sites]
        pairs = zip(sites, of_first_process(measured), strict=True)
        missing = [site for site, is_measured in pairs if not is_measured]
        table = self._save({})
        for site in left_out:
            self._print(f"left out, the cost model decides about it: {site}")
        minutes = math.ceil(estimated_seconds(missing) / 60)
        about = f", in about {minutes} minute{'s' * (minutes != 1)}"
        if self.devices[0].platform != "gpu":
            about = ""  # Nothing is known of others.
        self._print(
            f"{len(missing)} of {len(sites)} sites to measure{about}; the table is {self.path}"
        )
        for done, trial in enumerate(trials(missing, self.devices, self.implementations), start=1):
            table = self._measure(trial) or table
            is_late = of_first_process(self._seconds_passed() > self.limit_seconds)
            if done < len(missing) and is_late:
                self._print(f"out of time: {len(missing) - done} sites are left")
                break
        return table

    def _is_measured(self, site: Request, entry: Entry | None) -> bool:
        return (
            entry is not None
            and entry.run.jax == self.run.jax
            and all(
                name in entry.seconds or unsupported_reason(site, name)
                for name in self._names_of(site)
            )
        )

    def _names_of(self, site: Request) -> Iterator[str]:
        """The names that are measured for a request."""
        yield from (name for name in self.implementations if name in site.backends)
        if OPS[site.op].has_bound:
            yield COMPUTE_ONLY

    def _measure(self, trial: Trial) -> Table | None:
        """Adds a site to the table, if its reference could be measured."""
        seconds = trial.seconds(self.measure, self.groups)
        for name, reason in trial.failures.items():
            self._print_once(f"{name} is left out: {reason}")
        if REFERENCE not in seconds:
            return None
        shown = ", ".join(f"{name} {value * 1e6:.0f}" for name, value in seconds.items())
        self._print(f"{trial.site}: {shown} µs")
        return self._save({trial.site: Entry(seconds, self.run)})

    def _save(self, entries: dict[Request, Entry]) -> Table:
        return table_files.save(self.path, self.devices[0].device_kind, entries)

    def _print(self, message: str) -> None:
        if jax.process_index():
            return
        print(f"[{self._seconds_passed():6.1f} s] {message}", flush=True)

    def _print_once(self, message: str) -> None:
        """Prints a message that many sites share."""
        if message not in self.printed:
            self.printed.add(message)
            self._print(f"{message} (reported once)")

    def _seconds_passed(self) -> float:
        return time.monotonic() - self.started
