"""What was decided for every op of a program, as a table."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from collective_matmul.choose.decision import Decision, record_decisions

# JAX traces again what it has traced before only if something that it looks at has changed.
_trace_number = jax.make_user_context(0)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Explanation:
    """The decisions for a program; `str` of it is a table.

    Attributes:
      decisions: in the order of tracing, one for every op traced. What a loop runs many times is
        traced once.
    """

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        if not self.decisions:
            return "no collective matmuls"
        counts = Counter((d, d.site.source, d.site.direction) for d in self.decisions)
        rows = [_row(decision, count) for (decision, _, _), count in counts.items()]
        return f"{_aligned([_HEAD, *rows])}\n{_totals(self.decisions)}"


def explain(fun: Callable) -> Callable[..., Explanation]:
    """What carries out every collective matmul of a function, and why: ``explain(fun)(*args)``.

    The function is traced for the shapes of its arguments, and neither compiled nor run; it may be
    jitted, differentiate, and enter `jax.shard_map`. Prints as a table::

        print(explain(jax.grad(loss))(params, batch))

    Each line is an op of one shape, called at one line of the program: how often it was traced,
    where, in which pass, its local matmuls, what carries it out, the microseconds predicted for
    that and for bulk (the weight gradient's matmul of a backward included), and the reason.

    Decisions are those for the devices of the mesh. For others than those here, give `shard_map` a
    `jax.sharding.AbstractMesh` with the `jax.sharding.AbstractDevice` of another kind, as
    ``AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")``.

    Args:
      fun: to be explained.

    Returns:
      A function that takes the arguments of `fun`, or their `jax.ShapeDtypeStruct`, and returns an
      `Explanation`.
    """

    def explanation(*args: Any, **kwargs: Any) -> Explanation:
        with _trace_number(next(_numbers)), record_decisions() as decisions:
            jax.eval_shape(fun, *args, **kwargs)
        return Explanation(tuple(decisions))

    return explanation


_HEAD = ("", "where", "pass", "op", "local shapes", "chosen", "µs", "bulk µs", "why")


def _row(decision: Decision, count: int) -> tuple[str, ...]:
    site = decision.site
    return (
        f"{count}×",
        str(site.source or "?"),
        site.direction,
        site.op,
        site.shapes,
        decision.implementation,
        _microseconds(decision.seconds),
        _microseconds(decision.bulk_seconds),
        decision.reason,
    )


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.0f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _totals(decisions: Sequence[Decision]) -> str:
    known = [(d.seconds, d.bulk_seconds) for d in decisions if d.seconds and d.bulk_seconds]
    if not known:
        return f"{len(decisions)} collective matmuls"
    seconds, bulk = map(sum, zip(*known, strict=True))
    return (
        f"{len(decisions)} collective matmuls; of {len(known)} the times are predicted:"
        f" {seconds * 1e3:.2f} ms, {bulk * 1e3:.2f} ms in bulk ({bulk / seconds:.2f}×)"
    )
