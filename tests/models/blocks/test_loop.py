"""Gathered weights are freed after the forward and gathered again, and gradients are right."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var
from jax.sharding import PartitionSpec as P

from collective_matmul.jaxprs.walks import all_equations
from models.blocks.apply import apply_blocks
from models.blocks.barriers import tied_in_backward
from models.blocks.loop import Scanned, Unrolled
from models.parameters.use import Gathers, as_varying

DEVICES, ROWS, FEATURES, HIDDEN = 8, 2, 16, 64
#: Both matrices of a block are sharded in the dimension of size FEATURES.
DIMENSIONS = {"up": 0, "down": 1}
SPECS = {"up": P("fsdp"), "down": P(None, "fsdp"), "scale": P()}
Block = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The use of matrices that a mesh axis shards, and of vectors that it does not."""

    gathers: Gathers | None

    def weights(self, parameters: Block, gathered: Any, *, whole: bool = False) -> Block:
        del whole
        if gathered is not None:
            return gathered
        return {
            name: lax.all_gather(x, "fsdp", axis=DIMENSIONS[name], tiled=True)
            if name in DIMENSIONS
            else as_varying(x, ["fsdp"])
            for name, x in parameters.items()
        }

    def gradients(self, gradients: Block, *, whole: bool = False) -> Block:
        del whole
        return {
            name: lax.psum_scatter(x, "fsdp", scatter_dimension=DIMENSIONS[name], tiled=True)
            if name in DIMENSIONS
            else lax.psum(x, "fsdp")
            for name, x in gradients.items()
        }


@jax.jit
def contract(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A jitted function in a block, which hands a transposed weight to the backward."""
    return x @ kernel.T.T


def block(kind: int, weights: Block, x: jax.Array, shift: jax.Array) -> jax.Array:
    """Blocks of other kinds compute with another activation."""
    activation = (jnp.tanh, jnp.sin, jnp.cos)[kind]
    hidden = activation(contract(x * weights["scale"].reshape(1, -1) + shift, weights["up"]))
    return x + contract(hidden, weights["down"])


def make_blocks(depth: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = {"up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES), "scale": (FEATURES,)}
    return [
        {name: rng.normal(size=shape).astype("float32") / 4 for name, shape in shapes.items()}
        for _ in range(depth)
    ]


def stacked(blocks: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def loss_and_gradients(
    mesh: Any,
    depth: int,
    *,
    gathers: Gathers | None = "blocks",
    gathered_before: bool = False,
    unroll: int = 0,
    remat: bool = False,
    kinds: int = 1,
) -> Callable[..., Any]:
    """The loss of blocks and a head, and its gradients; blocks are scanned if `unroll` is not 0."""
    funs = [functools.partial(block, kind) for kind in range(kinds)]
    funs = list(map(jax.checkpoint, funs)) if remat else funs
    use = Shards(gathers)
    loop = Scanned(depth, unroll, kinds) if unroll else Unrolled(depth, kinds)

    def local(blocks: list[Block], head: Block, x: jax.Array) -> Any:
        whole = [use.weights(b, None) for b in blocks] if gathered_before else None

        def loss(blocks: list[Block], head: Block, x: jax.Array) -> jax.Array:
            own, gathered = blocks, whole
            if unroll:
                own, gathered = stacked(blocks), whole and stacked(whole)
            y, head = apply_blocks(funs, use, loop, own, gathered, x, jnp.float32(0.5), last=head)
            return jax.lax.psum(jnp.sum((y @ head["up"]) ** 2), "fsdp")

        return jax.value_and_grad(loss, (0, 1, 2))(blocks, head, x)

    @jax.jit
    def sharded(blocks: list[Block], x: jax.Array) -> Any:
        specs = [SPECS] * depth, SPECS, P("fsdp")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), specs))(
            blocks, blocks[0], x
        )

    return sharded


def expected(blocks: list[Block], head: Block, x: jax.Array, kinds: int) -> jax.Array:
    y = x
    for number, weights in enumerate(blocks):
        y = block(number % kinds, weights, y, jnp.float32(0.5))
    return jnp.sum((y @ head["up"]) ** 2)


X = np.random.default_rng(1).normal(size=(DEVICES * ROWS, FEATURES)).astype("float32")


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (1, dict(remat=True)),
        (3, {}),
        (3, dict(gathers=None, gathered_before=True)),
        (1, dict(unroll=1)),
        (4, dict(unroll=1, remat=True)),
        (5, dict(unroll=2)),
        (3, dict(unroll=1, gathers=None)),
        (3, dict(unroll=1, gathers=None, gathered_before=True)),
        (5, dict(kinds=2)),
        (4, dict(unroll=1, kinds=2)),
        (6, dict(unroll=4, kinds=2, gathers=None)),
        (6, dict(unroll=1, kinds=3, remat=True)),
    ],
    ids=str,
)
def test_gradients_equal_those_of_whole_weights(make_mesh, depth, options):
    blocks = make_blocks(depth)
    found = loss_and_gradients(make_mesh({"fsdp": DEVICES}), depth, **options)(blocks, X)
    fun = functools.partial(expected, kinds=options.get("kinds", 1))
    right = jax.jit(jax.value_and_grad(fun, (0, 1, 2)))(blocks, blocks[0], X)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        # Sums of float32 in another order.
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-3)


def compiled(make_mesh: Any, depth: int, unroll: int) -> Any:
    """The program of a depth. Older jaxlib removes barriers early on CPUs, and merges the gathers
    of both passes."""
    return (
        loss_and_gradients(make_mesh({"fsdp": DEVICES}), depth, unroll=unroll)
        .lower(make_blocks(depth), X)
        .compile({"xla_disable_hlo_passes": "cse_barrier_expander"})
    )


def test_weights_are_gathered_twice_and_not_kept(make_mesh):
    """A block more takes memory for its activations and its shards, less than for its weights."""
    programs = {depth: compiled(make_mesh, depth, unroll=0) for depth in (3, 7)}
    gathers = {
        depth: len(re.findall(r"= \S+ all-gather(?:-start)?\(", program.as_text()))
        for depth, program in programs.items()
    }
    # Of two weights of each block, of which the forward and the backward gather both. The last
    # block's stay in between.
    assert gathers[3] == 2 * 2 * 3 - 2 + 1  # And the matrix of the head.
    assert gathers[7] - gathers[3] == 4 * 2 * 2
    memory = {
        depth: program.memory_analysis().temp_size_in_bytes for depth, program in programs.items()
    }
    of_weights = 4 * 2 * FEATURES * HIDDEN
    activations = 4 * ROWS * (2 * FEATURES + HIDDEN)
    for_one_block = (memory[7] - memory[3]) / 4
    assert for_one_block < of_weights / DEVICES + 2 * activations < of_weights / 2


def test_gradients_of_a_block_are_complete_before_the_block_after_next(make_mesh):
    """Barriers tie those of each block but the first one, which no block follows."""
    sharded = loss_and_gradients(make_mesh({"fsdp": DEVICES}), 3)
    (call,) = jax.make_jaxpr(sharded)(make_blocks(3), X).jaxpr.eqns
    (shard_map,) = call.params["jaxpr"].jaxpr.eqns
    equations = shard_map.params["jaxpr"].eqns
    shape = HIDDEN, FEATURES // DEVICES
    gradients = {
        v
        for equation in equations
        if equation.primitive.name in ("jit", "pjit")
        for v in equation.outvars
        if v.aval.shape == shape
    }
    assert len(gradients) == 3
    tied = [
        sum(isinstance(v, Var) and v in gradients for v in equation.invars)
        for equation in equations
        if equation.primitive.name == "optimization_barrier"
    ]
    # Two barriers are for the weights of the head and for its gradients.
    assert sorted(tied) == [0, 0, 1, 1]


@pytest.mark.parametrize("unroll", [0, 1])
def test_gradients_of_the_head_do_not_wait_for_the_blocks(make_mesh, unroll):
    """XLA would sum them last, and keep them whole until then."""
    fun = loss_and_gradients(make_mesh({"fsdp": DEVICES}), 3, unroll=unroll)
    (call,) = jax.make_jaxpr(fun)(make_blocks(3), X).eqns
    (sharded,) = call.params["jaxpr"].eqns
    body = sharded.params["jaxpr"]
    places = {v: place for place, equation in enumerate(body.eqns) for v in equation.outvars}
    # The results are the loss, gradients of the blocks, of the head and of x, by sorted names.
    _, *of_blocks = (places[v] for v in body.outvars[:-4])
    head = {places[v] for v in (body.outvars[-4], body.outvars[-2])}
    assert {body.eqns[place].primitive.name for place in head} == {"optimization_barrier"}
    assert max(head) < min(of_blocks[:6])  # Of the first two blocks, computed last.


def test_what_a_scan_keeps_is_written_to_memory_that_was_not_filled(make_mesh):
    fun = loss_and_gradients(make_mesh({"fsdp": DEVICES}), 3, unroll=1)
    text = str(jax.make_jaxpr(fun)(make_blocks(3), X))
    assert re.search(rf"f32\[3,{ROWS},{FEATURES}\]\S* = empty\[", text)
    assert not re.search(rf"f32\[3,{ROWS},\S* = broadcast_in_dim", text)


@pytest.mark.parametrize("loop", [Unrolled(4), Scanned(4, 2)], ids=str)
def test_gradients_by_jax_can_be_tied(loop: Unrolled | Scanned):
    """They are the same numbers, and nothing is computed for what is not differentiated."""
    blocks = make_blocks(4)

    def tie(x: jax.Array, own: Block) -> tuple[jax.Array, Block]:
        x, trained = tied_in_backward(x, {"up": own["up"]})
        return x, own | trained

    def loss(tie: Any, trained: list[jax.Array], x: jax.Array) -> jax.Array:
        own: Any = [each | {"up": up} for each, up in zip(blocks, trained, strict=True)]
        own = stacked(own) if isinstance(loop, Scanned) else own

        def fun(own: Block, x: jax.Array, key: None) -> jax.Array:
            return block(0, own, x, jnp.float32(0.5))

        return jnp.sum(loop.applied([fun], own, None, x, tie=tie) ** 2)

    trained = [jnp.asarray(own["up"]) for own in blocks]
    free, tied = (jax.grad(functools.partial(loss, each)) for each in (None, tie))
    for own, other in zip(jax.jit(free)(trained, X), jax.jit(tied)(trained, X), strict=True):
        np.testing.assert_array_equal(own, other)
    without, program = (
        [*all_equations(jax.make_jaxpr(fun)(trained, X).jaxpr)] for fun in (free, tied)
    )
    barriers: list[Any] = [e for e in program if e.primitive.name == "optimization_barrier"]
    shapes = [[v.aval.shape for v in equation.invars] for equation in barriers]
    # In one program those of all blocks but two. A loop has one program for its iterations.
    assert shapes == [[X.shape, (FEATURES, HIDDEN)]] * (2 if isinstance(loop, Unrolled) else 1)
    matmuls = [
        sum(equation.primitive.name == "dot_general" for equation in equations)
        for equations in (without, program)
    ]
    assert matmuls[0] == matmuls[1]
