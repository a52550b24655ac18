"""`explain`: the decisions for a program, and for collectives that could be ops, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from collective_matmul.backends import REFERENCE
from collective_matmul.compiler import renamed_fused
from collective_matmul.dispatch.decision_table import Line, format_table, line_of
from collective_matmul.dispatch.recording import Decision, force_retrace, record_decisions
from collective_matmul.peer_access import peer_kernels_allowed
from collective_matmul.rewrite import FoundSite, find_sites


@dataclass(frozen=True)
class Explanation:
    """The decisions for a program; `str` of it is a table.

    Attributes:
      decisions: one for every traced op, in the order of tracing: ops that the program calls, and
        ops that `collective_matmul.overlap` put in place of a collective and its matmuls. The body
        of a loop is traced once.
      plain: gathers and sums over devices that are not part of an op, in the order of the program.
        `overlap` would replace those with a decision, and leave the others alone.
    """

    decisions: tuple[Decision, ...]
    plain: tuple[FoundSite, ...]

    def __str__(self) -> str:
        if not self.decisions and not self.plain:
            return "no collective matmuls"
        lines = [*map(line_of, self.decisions), *map(_line_of_plain, self.plain)]
        return "\n".join(
            [format_table(lines), *_totals(self.decisions), *_totals_of_plain(self.plain)]
        )


def explain(
    fun: Callable, *, peer_kernels: bool = False, fused: bool | None = None
) -> Callable[..., Explanation]:
    """Explains which backend executes each collective matmul of a function, and why.

    ``explain(fun)(*args)`` traces the function for the shapes of its arguments; it neither compiles
    nor runs it. The function may be jitted, differentiate, and enter `jax.shard_map`. The result
    prints as a table::

        print(explain(jax.grad(loss))(params, batch))

    Each line is an op of one shape, called at one line of the program. Its columns: how often it
    was traced, where, in which pass, its local matmuls, the backend, the predicted microseconds of
    that backend and of xla (including the matmul of a weight gradient in a backward pass), the gain
    over xla, and the reason.

    Gathers and sums over devices that the program calls itself, such as `lax.all_gather`, have
    lines too. If `collective_matmul.overlap` replaced one, the line shows the op in its place.
    Without `overlap`, the line says that it is not replaced, and which backend `overlap` would use.
    For a collective that `overlap` leaves alone, the line gives the reason.

    Decisions are for the devices of the mesh. To explain a program for other devices, give
    `shard_map` a `jax.sharding.AbstractMesh` with a `jax.sharding.AbstractDevice` of another kind,
    such as ``AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")``.

    Args:
      fun: the function to explain.
      peer_kernels: whether it will be compiled by `overlap_jit` with ``peer_kernels=True``.
      fused: the name of `peer_kernels` in earlier releases.

    Returns:
      A function that takes the arguments of `fun`, or their `jax.ShapeDtypeStruct`, and returns an
      `Explanation`.
    """
    if fused is not None:
        peer_kernels = renamed_fused("explain", fused)

    def explanation(*args: Any, **kwargs: Any) -> Explanation:
        decisions: list[Decision] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with force_retrace(), record_decisions() as taken:
                result = fun(*args, **kwargs)
            decisions.extend(taken)
            return result

        # Sites are found after the function is traced: decisions about them are not recorded.
        with peer_kernels_allowed(peer_kernels):
            plain = find_sites(recorded)(*args, **kwargs)
        return Explanation(tuple(decisions), tuple(plain))

    return explanation


def _line_of_plain(site: FoundSite) -> Line:
    line = site.line
    if site.decision is None:
        return line
    would = f"overlap would use {site.decision.implementation}: {line.reason}"
    return replace(line, chosen="not replaced", reason=would)


def _totals(decisions: Sequence[Decision]) -> list[str]:
    if not decisions:
        return []
    known = [
        (d.seconds, d.reference_seconds) for d in decisions if d.seconds and d.reference_seconds
    ]
    if not known:
        return [f"{len(decisions)} collective matmuls"]
    seconds, reference = map(sum, zip(*known, strict=True))
    return [
        f"{len(decisions)} collective matmuls; of {len(known)} the times are predicted:"
        f" {seconds * 1e3:.2f} ms, {reference * 1e3:.2f} ms with {REFERENCE.name}"
        f" ({reference / seconds:.2f}×), each counted as often as it was traced, not as it runs"
    ]


def _totals_of_plain(sites: Sequence[FoundSite]) -> list[str]:
    if not sites:
        return []
    replaceable = sum(site.decision is not None for site in sites)
    return [
        f"{len(sites)} plain gathers and sums: {replaceable} that overlap would replace,"
        f" {len(sites) - replaceable} that it leaves alone"
    ]
