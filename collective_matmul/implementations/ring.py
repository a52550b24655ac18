"""Walks a schedule with `ppermute`, in lockstep.

The loop is unrolled: step i issues the permutes that the schedule gives it, multiplies the chunks
that are here, and then ties what arrived and what was computed together with an
`optimization_barrier`. Permute i + 1 can therefore start only when matmul i + 1 can, so a compiler
that knows nothing of either's cost still runs them side by side, and no more than two chunks (the
one being multiplied and the one arriving) are alive beyond the operands and the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax import lax

from collective_matmul._compat import axis_index, vary_over, varying_axes
from collective_matmul.implementations.arithmetic import add, matmul, matmul_sum
from collective_matmul.schedule import Chunk, Pattern, Step, Use, make_schedule

Chunks = dict[Chunk, jax.Array]


def all_gather_matmul(
    x: jax.Array,
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    keep_gathered: bool = False,
    pattern: Pattern = "one_way",
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Multiplies the shards of x as they arrive. Shapes: see the package's docstring."""
    gather = _Ring("gather", pattern, axis_name, dimension, x.shape[dimension])
    outputs = tuple(gather.empty((*x.shape[:-1], w.shape[1]), (x, w)) for w in ws)
    if keep_gathered:
        outputs += (gather.empty(x.shape, (x,)),)

    def products(chunk: jax.Array) -> tuple[jax.Array, ...]:
        return (*(matmul(chunk, w) for w in ws), *((chunk,) if keep_gathered else ()))

    held = gather.split(x)
    for i in range(len(gather.steps)):
        held, outputs = gather.pass_on(i, held, outputs, products)
        held, outputs = lax.optimization_barrier((held, outputs))
    return (outputs[:-1], outputs[-1]) if keep_gathered else (outputs, None)


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    rider: jax.Array | None = None,
    pattern: Pattern = "one_way",
) -> tuple[jax.Array, jax.Array | None]:
    """Sums the chunks while their accumulators travel. Shapes: see the package's docstring."""
    rows = xs[0].shape[dimension] // lax.axis_size(axis_name)
    scatter = _Ring("scatter", pattern, axis_name, dimension, rows)
    sums: Chunks = {}
    gather, held = None, Chunks()
    gathered: tuple[jax.Array, ...] = ()
    if rider is not None:
        gather = _Ring("gather", pattern, axis_name, dimension, rider.shape[dimension])
        held, gathered = gather.split(rider), (gather.empty(rider.shape, (rider,)),)
    for i, step in enumerate(scatter.steps):
        arriving = scatter.permute(sums, step)
        if gather is not None:
            held, gathered = gather.pass_on(i, held, gathered, lambda chunk: (chunk,))
        for send in step.sends:
            del sums[send.chunk]
        products = {
            chunk: matmul_sum([scatter.read(x, chunk) for x in xs], ws) for chunk in step.multiply
        }
        for chunk, value in (*products.items(), *arriving.items()):
            sums[chunk] = add(sums[chunk], value) if chunk in sums else value
        # The operands too: the next matmul must not start before this step has ended.
        xs, sums, held, gathered = lax.optimization_barrier((xs, sums, held, gathered))
    return scatter.join(sums), gathered[0] if gathered else None


def matmul_all_reduce(
    x: jax.Array, w: jax.Array, axis_name: str, *, pattern: Pattern = "one_way"
) -> jax.Array:
    """Reduce-scatters the rows in a ring, then gathers them with one collective.

    The gather has no matmul left to hide under. Shapes: see the package's docstring. The product
    of the leading dimensions must be a multiple of D.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y, _ = matmul_reduce_scatter([rows], [w], axis_name, dimension=0, pattern=pattern)
    y = lax.all_gather(y, axis_name, axis=0, tiled=True, to="invarying")
    return y.reshape(*x.shape[:-1], w.shape[1])


class _Ring:
    """A schedule on a mesh axis, and where its chunks lie in arrays along one dimension.

    `rows` is the size of one shard along `dimension`; whole arrays have D times that.
    """

    def __init__(self, use: Use, pattern: Pattern, axis_name: str, dimension: int, rows: int):
        self.axis_name = axis_name
        self.devices = lax.axis_size(axis_name)
        self.device = axis_index(axis_name)
        # One row has no halves to send both ways.
        self.schedule = make_schedule(use, pattern if rows > 1 else "one_way", self.devices)
        self.steps = self.schedule.steps
        self.dimension = dimension
        self.rows = rows
        self.bounds = self.schedule.part_bounds(rows)

    def permute(self, chunks: Chunks, step: Step) -> Chunks:
        """Carries out the sends of a step; returns what arrives."""
        return {
            send.arrival: lax.ppermute(
                chunks[send.chunk], self.axis_name, send.permutation(self.devices)
            )
            for send in step.sends
        }

    def pass_on(
        self,
        i: int,
        held: Chunks,
        outputs: tuple[jax.Array, ...],
        products: Callable[[jax.Array], tuple[jax.Array, ...]],
    ) -> tuple[Chunks, tuple[jax.Array, ...]]:
        """Step i of a gather: sends, and writes what `products` makes of each chunk here."""
        step = self.steps[i]
        arriving = self.permute(held, step)
        for chunk in step.multiply:
            outputs = tuple(
                self.write(output, chunk, value)
                for output, value in zip(outputs, products(held[chunk]), strict=True)
            )
        needed = self.schedule.chunks_used_after(i)
        held = {chunk: value for chunk, value in (held | arriving).items() if chunk in needed}
        return held, outputs

    def split(self, shard: jax.Array) -> Chunks:
        """The parts of this device's own shard."""
        return {
            Chunk(0, part): lax.slice_in_dim(shard, start, stop, axis=self.dimension)
            for part, (start, stop) in enumerate(self.bounds)
        }

    def join(self, chunks: Chunks) -> jax.Array:
        """This device's own shard from its parts."""
        parts = [chunks[Chunk(0, part)] for part in range(len(self.bounds))]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, self.dimension)

    def empty(self, shard_shape: Sequence[int], like: Sequence[jax.Array]) -> jax.Array:
        """An array for D shards of `shard_shape`, to be written whole; typed to vary as `like`."""
        shape = list(shard_shape)
        shape[self.dimension] = self.rows * self.devices
        axes = frozenset().union(*(varying_axes(array) for array in like))
        return vary_over(lax.empty(tuple(shape), like[0].dtype), axes)

    def write(self, whole: jax.Array, chunk: Chunk, value: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(whole, value, self._start(chunk), self.dimension)

    def read(self, whole: jax.Array, chunk: Chunk) -> jax.Array:
        start, stop = self.bounds[chunk.part]
        return lax.dynamic_slice_in_dim(whole, self._start(chunk), stop - start, self.dimension)

    def _start(self, chunk: Chunk) -> jax.Array:
        owner = (self.device + chunk.offset) % self.devices
        return owner * self.rows + self.bounds[chunk.part][0]
