"""`explain`: the decisions for a program, and for collectives that could be ops, as a table."""

from __future__ import annotations

import functools
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Never

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from collective_matmul.dispatch.decision_table import WIDTH, Line, format_table, line_of
from collective_matmul.dispatch.recording import Decision, force_retrace, record_decisions
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.dispatch.run_counts import RunCounter, count_runs, is_numbered
from collective_matmul.dispatch.selection import reference_alone
from collective_matmul.hardware import assumed_rates
from collective_matmul.jaxprs.collectives import axes_of, collective_seconds
from collective_matmul.jaxprs.dead_code import without_dead_code
from collective_matmul.jaxprs.repeats import repeats
from collective_matmul.jit.compiler import (
    OverlapJit,
    PeerKernels,
    check_peer_kernels,
    renamed_fused,
)
from collective_matmul.jit.graph_functions import check_function, explaining_arguments
from collective_matmul.jit.peer_decision import NO_SITE, PeerKernelDecision, decide
from collective_matmul.peer_access import UNDECIDED, Disallowed, peer_kernels_allowed
from collective_matmul.rewrite import FoundSite, WrittenBlocks, rewritten, traced_program
from collective_matmul.rewrite.find.placements import auto_axes
from collective_matmul.rewrite.find.report import record_considered
from collective_matmul.rewrite.transform import NOTHING_SHOWN, Rewritten, shows_communication
from collective_matmul.tuning.tune import estimated_seconds


@dataclass(frozen=True)
class MergedGathers:
    """Gathers of arrays that an op before gathers too, by XLA's collectives.

    Attributes:
      number: how many of them a run of the program executes.
      seconds: their predicted time.
    """

    number: int = 0
    seconds: float = 0.0


NONE_MERGED = MergedGathers()
#: How to pass the arguments of a function.
_CALL = "explain({})(*args)"


@dataclass(frozen=True)
class Explanation:
    """The decisions for a program; `str` of it is a table.

    Attributes:
      decisions: one for every traced op, in the order of tracing: ops that the program calls, and
        ops that `collective_matmul.overlap` put in place of a collective and its matmuls. The body
        of a loop is traced once; what is differentiated may be traced twice.
      plain: gathers and sums over devices that are not part of an op, in the order of the program.
        `overlap` would replace those with a decision, and leave the others alone.
      peer_kernels: whether the program may have kernels that address peers' memory, and why.
      enters_shard_map: whether the function enters a `jax.shard_map`, or has arrays that mesh axes
        of type Explicit shard. Without, there is nothing to explain or to replace.
      auto_axes: mesh axes of type Auto, over which types of arrays show nothing.
      runs: how often a run of the program executes the ops and collectives of each line of the
        table. Branches count as taken, loops of unknown length as one step, and what computes
        nothing that the program returns as not run.
      verbose: whether the table has lines of what is left alone, and not their number alone.
      merged: the gathers that XLA merges with others of the same array, of ops that it executes.
      merged_by_reference: those that it would merge if its collectives executed all ops. Totals are
        without the time of either.
    """

    decisions: tuple[Decision, ...]
    plain: tuple[FoundSite, ...]
    runs: Mapping[Line, int] = field(default_factory=dict)
    enters_shard_map: bool = True
    peer_kernels: PeerKernelDecision = NO_SITE
    auto_axes: tuple[str, ...] = ()
    verbose: bool = False
    merged: MergedGathers = NONE_MERGED
    merged_by_reference: MergedGathers = NONE_MERGED

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = WIDTH, verbose: str = "explain(fun, verbose=True)") -> str:
        """The table and the totals.

        Args:
          width: the number of characters that no line exceeds.
          verbose: how the reader asks for `Explanation.verbose`, such as a flag of a program.
        """
        if not self.enters_shard_map:
            return textwrap.fill(f"no collective matmuls: {NOTHING_SHOWN}", width)
        if not self.decisions and not self.plain:
            return "no collective matmuls: its shard_maps call no op and neither gather nor sum"
        shown = [site for site in self.plain if site.replaced or self.verbose]
        lines = [*map(line_of, self.decisions), *map(_line_of_plain, shown)]
        runs = {line: self.runs[line] for line in lines if line in self.runs}
        table = [format_table(lines, runs, width)] if lines else []
        return "\n".join(
            [*table, *(textwrap.fill(total, width) for total in self._totals(verbose))]
        )

    def _totals(self, verbose: str) -> list[str]:
        """Sentences about all lines together. The argument is that of `table`."""
        ops = {line_of(decision): decision for decision in self.decisions}
        alike: dict[str, list[tuple[int, Decision]]] = defaultdict(list)
        for line, each in ops.items():
            alike[each.site.backends.reference_differs].append((self.runs.get(line, 0), each))
        totals = []
        for differs in sorted(alike):
            totals += self._totals_of(alike[differs], differs)
        totals += self._advice_on_gathers()
        if (unmeasured := _unmeasured(self.decisions)) is not None:
            totals.append(unmeasured)
        if hidden := dict.fromkeys(a for each in self.decisions for a in each.automatic_axes):
            totals.append(
                f"shapes count all that {' and '.join(hidden)} may divide, such as a batch: an op"
                " does not see what XLA shards over Auto axes. data_axis_name= of parallelize and"
                " of layers, or a jax.shard_map over these axes, shows it one device's part"
                " (docs/how_to/parallelize.md)"
            )
        if self.plain:
            totals.append(self._total_of_plain(verbose))
        if self.auto_axes:
            totals.append(
                f"mesh axes of type Auto show nothing: {', '.join(self.auto_axes)}. The compiler"
                " communicates over them where it sees fit; jax.make_mesh(..., axis_types=...) with"
                " jax.sharding.AxisType.Explicit for them shows it"
            )
        if self.peer_kernels.matters:
            totals.append(str(self.peer_kernels))
        return totals

    def _totals_of(self, ops: Sequence[tuple[int, Decision]], differs: str) -> list[str]:
        """Sentences about ops, each with how often it runs.

        Args:
          ops: those whose reference differs from other backends in the same way.
          differs: that way, or "".
        """
        names = " and ".join(sorted({each.site.op for _, each in ops}))
        what = names if differs else "collective matmuls"
        total = f"{_counted_runs(sum(n for n, _ in ops))} of {what}"
        known = [(n, each) for n, each in ops if each.seconds and each.reference_seconds]
        if not known:
            return [total]
        # Gathers that are merged are those of matmuls.
        merged = 0.0 if differs else self.merged.seconds
        by_reference = 0.0 if differs else self.merged_by_reference.seconds
        seconds = sum(n * (each.seconds or 0) for n, each in known) - merged
        reference = sum(n * (each.reference_seconds or 0) for n, each in known) - by_reference
        total += (
            f"; of {sum(n for n, _ in known)} the times are predicted: {seconds * 1e3:.2f} ms,"
            f" {reference * 1e3:.2f} ms with {REFERENCE}{differs and f', which {differs}'}"
            f" ({_ratio(reference, seconds)})"
        )
        communication = sum(n * (each.communication_seconds or 0) for n, each in known)
        communication -= by_reference
        communicate = f"they communicate for {communication * 1e3:.2f} ms"
        if differs:
            return [total, communicate] if communication else [total]
        hidden = min(sum(n * each.hidden_seconds for n, each in known), communication)
        share = hidden / max(communication, 1e-12)
        communicate += (
            f" with {REFERENCE}, which hides nothing; of that, {hidden * 1e3:.2f} ms ({share:.0%})"
            f" are hidden under matmuls, and {(communication - hidden) * 1e3:.2f} ms are left"
        )
        return [total, communicate]

    def _advice_on_gathers(self) -> list[str]:
        """Advice about ops that gather the same array, each for itself."""
        number = self.merged_by_reference.number
        if not number:
            return []
        are_timed = any(each.seconds for each in self.decisions)
        return [
            f"in {_counted_runs(number)}, an op gathers an array that another op gathers too."
            f" {REFERENCE} gathers an array once for"
            f" all{', and the totals count that' if are_timed else ''}. One call of the op with all"
            " weights, or layers.Shared for the layers, does so with each backend"
        ]

    def _total_of_plain(self, verbose: str) -> str:
        """How many plain gathers and sums there are, what becomes of them, and their time."""
        sites = [site for site in self.plain if site.replaced]
        alone = [site for site in self.plain if not site.replaced]
        listed = "" if self.verbose else f" ({verbose} lists {'them' if len(alone) > 1 else 'it'})"
        parts = [
            _counted(
                sites,
                "site" if len(sites) == 1 else "sites",
                " (require counts the sites)",
                _becomes(sites),
            ),
            _counted(alone, "left alone", also=listed),
        ]
        what = "plain gathers and sums" if len(self.plain) > 1 else "plain gather or sum"
        total = f"{len(self.plain)} {what}: {'; '.join(filter(None, parts))}"
        known = [(site.runs, site.communication_seconds) for site in self.plain]
        if any(seconds is None for _, seconds in known):
            return total
        seconds = sum(n * (each or 0) for n, each in known)
        return f"{total}; one by one, at NVLink's rate, they take {seconds * 1e3:.2f} ms"


def explain(
    fun: Callable,
    *misplaced: Never,
    peer_kernels: PeerKernels = UNDECIDED,
    verbose: bool = False,
    fused: bool | None = None,
) -> Callable[..., Explanation]:
    """Explains which backend executes each collective matmul of a function, and why.

    ``explain(fun)(*args)`` traces the function for the shapes of its arguments; it neither compiles
    nor runs it. The function may be jitted, differentiate, and enter `jax.shard_map`. The result
    prints as a table::

        print(explain(jax.grad(loss))(params, batch))

    Each line is an op of one shape, called at one line of the program. Its columns: how often it
    runs, where, in which pass, its local matmuls, the backend, the predicted microseconds of
    that backend and of xla (including the matmul of a weight gradient in a backward pass), the gain
    over xla, and the reason. A loop of three steps runs an op three times; as a site, which
    `overlap` replaces and its `require` counts, it is one place in the program.

    The shapes begin with the dtype in which arrays travel and are multiplied. "gathered kept" says
    that the op returns the gathered array too, as a gradient needs it. If the program asks
    for 8 bits, a column names those of each op: of what travels, of both operands of its matmuls,
    and of those of a weight gradient. If an op keeps its dtype all the same, the last column says
    why.

    Gathers and sums over devices that the program calls itself, such as `lax.all_gather`, have
    lines too. If `collective_matmul.overlap` replaced one, the line shows the op in its place.
    Without `overlap`, the line says which backend it gets if the function is passed to `overlap`.
    Collectives that `overlap` leaves alone are counted in the totals; with `verbose` they have
    lines, which give the reasons.

    Decisions are for the devices of the mesh. To explain a program for other devices, give
    `shard_map` a `jax.sharding.AbstractMesh` with a `jax.sharding.AbstractDevice` of another kind,
    such as ``AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")``.

    Args:
      fun: the function to explain; of one of `overlap_jit`, the function that it compiles.
      *misplaced: none; the arguments of `fun` are for the function that is returned.
      peer_kernels: as for the `overlap_jit` by which it will be compiled, or is. With "auto",
        the last lines of the table say whether kernels that address peers' memory are allowed, and
        why. Lines of collectives that `overlap` would replace are for the decision that the program
        would get then.
      verbose: list what `overlap` leaves alone, and not its number alone.
      fused: the name of `peer_kernels` in earlier releases.

    Returns:
      A function that takes the arguments of `fun`, or their `jax.ShapeDtypeStruct`, and returns an
      `Explanation`.

    Raises:
      TypeError: if `fun` is no function; from what is returned, for arguments that `fun` does not
        take.
      ValueError: for another `peer_kernels`.
    """
    _check_misplaced(misplaced)
    if fused is not None:
        peer_kernels = renamed_fused("explain", fused)

    check_peer_kernels("explain", peer_kernels)
    check_function(fun)
    if isinstance(fun, OverlapJit):
        allowed = fun.requested if peer_kernels == UNDECIDED else peer_kernels

        def of_compiled(*args: Any, **kwargs: Any) -> Explanation:
            given = args, kwargs
            function, args, kwargs = fun.uncompiled(args, kwargs)
            with explaining_arguments(_CALL, fun, *given):
                return explain(function, peer_kernels=allowed, verbose=verbose)(*args, **kwargs)

        return of_compiled

    def explanation(*args: Any, **kwargs: Any) -> Explanation:
        with explaining_arguments(_CALL, fun, args, kwargs):
            traced = _traced(fun, args, kwargs, peer_kernels)
        overlapped = traced.overlapped(peer_kernels)
        if isinstance(peer_kernels, bool):
            decision = PeerKernelDecision(peer_kernels, "requested")
        else:
            decision = decide(traced.live.jaxpr, traced.counter)
            after_overlap = decide(overlapped.program.jaxpr, traced.counter)
            if decision.withheld:
                traced = _traced(fun, args, kwargs, _value(decision))
            if decision.withheld or after_overlap.withheld:
                overlapped = traced.overlapped(_value(after_overlap))
        explained = traced.explanation(overlapped)
        merged = explained.merged
        if len(explained.decisions) > 1:
            with reference_alone():
                merged = _merged_gathers(_traced(fun, args, kwargs, False).live.jaxpr)
        return replace(
            explained, peer_kernels=decision, verbose=verbose, merged_by_reference=merged
        )

    return explanation


def _check_misplaced(args: tuple) -> None:
    """Raises TypeError if there are arguments beside the function."""
    if args:
        raise TypeError(
            f"args: {len(args)} beside the function; expected its arguments in a call of what"
            " explain returns: explain(f)(*args)"
        )


def _value(decision: PeerKernelDecision) -> bool | Disallowed:
    """The value of `peer_kernels_allowed` for a program about which was decided."""
    return decision.allowed or Disallowed(decision.reason)


@dataclass(frozen=True)
class _RecordedTrace:
    """A traced program, and what was recorded meanwhile."""

    program: ClosedJaxpr
    decisions: Sequence[Decision]
    considered: Sequence[FoundSite]
    counter: RunCounter
    blocks: WrittenBlocks = field(default_factory=WrittenBlocks)

    @functools.cached_property
    def live(self) -> ClosedJaxpr:
        """The program without what XLA does not execute. Ops and collectives of it count."""
        return ClosedJaxpr(without_dead_code(self.program.jaxpr), self.program.consts)

    def overlapped(self, allowed: Any) -> Rewritten:
        """Rewrites the live program as `overlap` does, with `peer_kernels_allowed` as given."""
        # Sites are found after the function is traced: decisions about them are not recorded.
        with peer_kernels_allowed(allowed), count_runs(self.counter):
            return rewritten(self.live, blocks=self.blocks)

    def explanation(self, overlapped: Rewritten) -> Explanation:
        """The explanation, with what `overlap` would replace."""
        plain = _as_considered(overlapped.sites, self.considered)
        ops = self.counter.runs(self.live.jaxpr)
        numbers = {self.counter.number_of(each): line_of(each) for each in self.decisions}
        runs: Counter[Line] = Counter()
        for number, line in numbers.items():
            runs[line] += ops[number]
        for site in plain:
            if site.kept or not site.is_weight:  # Else its line is the op's, which counts once.
                runs[_line_of_plain(site)] += site.runs
        return Explanation(
            tuple(self.decisions),
            tuple(plain),
            runs,
            shows_communication(self.program),
            auto_axes=auto_axes(self.program.jaxpr),
            merged=_merged_gathers(self.live.jaxpr),
        )


def _traced(fun: Callable, args: tuple, kwargs: dict, allowed: Any) -> _RecordedTrace:
    decisions: list[Decision] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with force_retrace(), record_decisions() as taken:
            result = fun(*args, **kwargs)
        decisions[:] = taken  # Of the last trace: a function of nnx objects may need two.
        return result

    with peer_kernels_allowed(allowed), count_runs() as counter, record_considered() as considered:
        program = traced_program(recorded, args, kwargs)
    return _RecordedTrace(program, decisions, considered, counter)


def _merged_gathers(program: Jaxpr) -> MergedGathers:
    """The gathers of a program that XLA merges, within ops that its collectives execute."""
    seconds, number = 0.0, 0
    for equation, _, runs in repeats(program, _is_gather_of_an_op):
        sizes = {axis: equation.params["axis_size"] for axis in axes_of(equation)}
        seconds += runs * collective_seconds(equation, sizes, assumed_rates())
        number += runs
    return MergedGathers(number, seconds)


def _is_gather_of_an_op(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "all_gather" and is_numbered(equation)


def _unmeasured(decisions: Sequence[Decision]) -> str | None:
    """How many requests were decided by models that `tune` can measure; None if there are none."""
    tabled = {each.site.flat: each for each in decisions if each.site.is_tabled}
    sites = [site for site, each in tabled.items() if each.is_unmeasured]
    if not sites:
        return None
    sizes = " and ".join(map(str, sorted({site.axis_size for site in sites})))
    minutes = math.ceil(estimated_seconds(sites) / 60)
    return (
        f"{len(sites)} of {len(tabled)} different shapes were never measured on {sizes} devices,"
        f" and their times are a cost model's; collective_matmul.tune measures them there, in about"
        f" {minutes} minute{'s' * (minutes > 1)}"
    )


def _as_considered(sites: Sequence[FoundSite], considered: Sequence[FoundSite]) -> list[FoundSite]:
    """The sites of a program, those that `overlap` left alone with the reports for its arguments.

    Sites of one place and shape are in the same order, unless the program was changed since.
    """
    found, left = (_by_key(each) for each in (sites, considered))
    reports = {
        key: iter(left[key] if len(left[key]) == len(alike) else repeat(left[key][-1]))
        for key, alike in found.items()
        if key in left
    }
    return [
        replace(next(reports[site.key]), runs=site.runs) if site.key in reports else site
        for site in sites
    ]


def _by_key(sites: Iterable[FoundSite]) -> dict[tuple, list[FoundSite]]:
    alike: dict[tuple, list[FoundSite]] = defaultdict(list)
    for site in sites:
        alike[site.key].append(site)
    return alike


def _line_of_plain(site: FoundSite) -> Line:
    line = site.line
    if site.decision is None or site.kept:
        return line
    return replace(line, chosen=f"{site.decision.implementation}, with overlap")


def _becomes(sites: Sequence[FoundSite]) -> str:
    """Says what `overlap` does with sites."""
    kept = sum(site.kept for site in sites)
    if kept == len(sites):
        return "; on these devices overlap keeps the program's own collectives"
    if not kept:
        them = "it" if len(sites) == 1 else "them"
        return f"; pass the function to overlap to replace {them}"
    return (
        f"; pass the function to overlap to replace {len(sites) - kept} of them; it keeps {kept} as"
        " written on these devices"
    )


def _counted_runs(number: int) -> str:
    return f"{number:,} run{'s' * (number != 1)}"


def _counted(places: Sequence[FoundSite], what: str, of_runs: str = "", also: str = "") -> str:
    """The number of places in the program, what they are, and the number of their runs.

    Args:
      places: the places; of none the text is empty.
      what: what they are.
      of_runs: what is said behind the number of runs, where it is another one.
      also: what is said last.
    """
    if not places:
        return ""
    runs = sum(place.runs for place in places)
    differ = f", {_counted_runs(runs)}{of_runs}" if runs != len(places) else ""
    return f"{len(places)} {what}{differ}{also}"


def _ratio(reference: float, seconds: float) -> str:
    return f"{reference / seconds:.2f}×" if seconds else "no run"
