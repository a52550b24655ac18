"""Orders of execution of blocks: one after the other in one program, or in a loop of it.

Each runs a step for all blocks, and once more in reverse for their gradients, which it collects. In
the reverse, the gradients of a block are complete before the block after next begins: XLA would
otherwise postpone them, and keep what they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from models.blocks.barriers import tied
from models.parameters.use import Tree, as_varying

#: The activations between two blocks, of which the first array is the residual stream, and the
#: weights of the next one, if it has them already.
Carry = tuple[Tree, Tree]
#: ``carry, result = step(carry, number of the block, its kind)``.
Step = Callable[[Carry, Any, int], tuple[Carry, Tree]]
#: Returns activations and the parameters of a block, of which gradients are tied.
Tie = Callable[[Tree, Tree], tuple[Tree, Tree]]


class BlockLoop(Protocol):
    """An order of execution of `count` blocks of one structure.

    Blocks may be of several kinds, which take turns: block n is of kind ``n % period``. They have
    the same parameters, and keep the same for the backward, and compute something else.
    """

    @property
    def count(self) -> int:
        """The number of blocks."""
        ...

    @property
    def period(self) -> int:
        """The number of kinds."""
        ...

    def take(self, blocks: Any, number: Any) -> Tree:
        """Block `number` of a collection of blocks."""
        ...

    def neighbour(self, number: Any, offset: int) -> Any | None:
        """The number of the block after (offset 1) or before (-1) one; None if there is none."""
        ...

    def applied(
        self,
        funs: Sequence[Callable],
        blocks: Any,
        keys: Any,
        x: Tree,
        *others: Any,
        tie: Tie | None = None,
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, by the function of its kind, with
        JAX's own derivative. `keys` are random keys [count], or None; without `tie`, gradients of
        blocks of one program may be postponed."""
        ...

    def run(self, step: Step, carry: Carry) -> tuple[Carry, Any]:
        """Applies the step to each block.

        Returns:
          The last carry, and the collection of the results.
        """
        ...

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, Any, Tree]:
        """Runs the blocks from the last to the first. Results are gradients, as those of `last`,
        which follows the blocks.

        Returns:
          The last carry, the collection of the results, and the gradients of `last`.
        """
        ...


@dataclass(frozen=True)
class Unrolled:
    """Blocks one after the other in one program. A collection of blocks is a list.

    Attributes:
      count: the number of blocks.
      period: the number of kinds.
    """

    count: int
    period: int = 1

    def take(self, blocks: Sequence[Tree], number: int) -> Tree:
        """Block `number`."""
        return blocks[number]

    def neighbour(self, number: int, offset: int) -> int | None:
        """The number of a neighbour, or None."""
        return number + offset if 0 <= number + offset < self.count else None

    def applied(
        self,
        funs: Sequence[Callable],
        blocks: Sequence[Tree],
        keys: Any,
        x: Tree,
        *others: Any,
        tie: Tie | None = None,
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative.

        Gradients of one block are complete before the block after next begins, as in
        `run_reversed`. Those of the first two are not tied: the input of the first may have none.
        """
        funs, blocks = [jax.jit(fun) for fun in funs], [*blocks]
        for number in range(self.count):
            if tie is not None and 0 < number < self.count - 1:
                x, blocks[number + 1] = tie(x, blocks[number + 1])
            key = None if keys is None else keys[number]
            x = funs[number % self.period](blocks[number], x, *others, key)
        return x

    def run(self, step: Step, carry: Carry) -> tuple[Carry, list[Tree]]:
        """Applies the step to each block."""
        results: list[Tree] = []
        for number in range(self.count):
            carry, result = step(carry, number, number % self.period)
            results.append(result)
        return carry, results

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, list[Tree], Tree]:
        """Applies the step to each block.

        Gradients of one block, or of `last`, are complete before the block after next begins: those
        of at most two are whole.
        """
        gradients = [last]
        for number in reversed(range(self.count)):
            (x, weights), own = step(carry, number, number % self.period)
            x, gradients[-1] = tied(x, gradients[-1])
            gradients.append(own)
            carry = x, weights
        return carry, gradients[:0:-1], gradients[0]


@dataclass(frozen=True)
class Scanned:
    """Blocks in a loop of the program. A collection of blocks is a tree of arrays [count, ...].

    A loop does not tell its first and last block from others, so these are their own neighbours,
    whose weights are then gathered once more.

    Attributes:
      count: the number of blocks.
      unroll: blocks per iteration; there are at least as many as kinds.
      period: the number of kinds, a divisor of `count`.
    """

    count: int
    unroll: int
    period: int = 1

    @property
    def _turns(self) -> tuple[int, int]:
        """The number of iterations with a block of each kind, and how many are unrolled."""
        return self.count // self.period, max(1, self.unroll // self.period)

    def _by_turns(self, blocks: Tree) -> Tree:
        """[count, ...] -> [turns, kinds, ...]; the same if there is one kind."""
        if self.period == 1:
            return blocks
        return jax.tree.map(lambda x: x.reshape(-1, self.period, *x.shape[1:]), blocks)

    def _of_kind(self, turn: Tree, kind: int) -> Tree:
        """A block of one turn."""
        return turn if self.period == 1 else jax.tree.map(lambda x: x[kind], turn)

    def take(self, blocks: Tree, number: jax.Array) -> Tree:
        """Block `number`, int32 []."""
        return jax.tree.map(
            functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False), blocks
        )

    def neighbour(self, number: jax.Array, offset: int) -> jax.Array:
        """The number of a neighbour, or of the block itself."""
        return jnp.clip(number + offset, 0, self.count - 1)

    def applied(
        self,
        funs: Sequence[Callable],
        blocks: Tree,
        keys: Any,
        x: Tree,
        *others: Any,
        tie: Tie | None = None,
    ) -> Tree:
        """``x = fun(block, x, *others, key)`` for each block, with JAX's own derivative.

        Gradients of a block that are tied are complete before the next begins: else all blocks of
        an iteration would keep what they need until its end.
        """

        def step(x: Tree, turn: tuple[Tree, Any]) -> tuple[Tree, None]:
            for kind, fun in enumerate(funs):
                block, key = self._of_kind(turn, kind)
                if tie is not None:
                    x, block = tie(x, block)
                x = fun(block, x, *others, key)
            return x, None

        return lax.scan(step, x, self._by_turns((blocks, keys)), unroll=self._turns[1])[0]

    def run(self, step: Step, carry: Carry) -> tuple[Carry, Tree]:
        """Applies the step to each block.

        Results are written to memory that nothing has been written to. `lax.scan` fills it with
        zeros first: a pass over all that is kept for the backward.
        """
        _, shapes = jax.eval_shape(lambda carry: step(carry, jnp.int32(0), 0), carry)
        leaves, structure = jax.tree.flatten(shapes)
        whole = [
            as_varying(
                lax.empty((self.count, *leaf.shape), leaf.dtype), leaf.manual_axis_type.varying
            )
            for leaf in leaves
        ]

        def one(turn: jax.Array, state: tuple[Carry, list[jax.Array]]) -> Any:
            carry, whole = state
            for kind in range(self.period):
                number = self._number(turn, kind)
                carry, results = step(carry, number, kind)
                pairs = zip(whole, jax.tree.leaves(results), strict=True)
                whole = [lax.dynamic_update_index_in_dim(a, x, number, 0) for a, x in pairs]
            return carry, whole

        turns, unroll = self._turns
        carry, whole = lax.fori_loop(0, turns, one, (carry, whole), unroll=unroll)
        return carry, jax.tree.unflatten(structure, whole)

    def run_reversed(self, step: Step, carry: Carry, last: Tree) -> tuple[Carry, Tree, Tree]:
        """Applies the step to each block. Gradients of `last` are complete before the loop."""
        x, last = tied(carry[0], last)
        turns, unroll = self._turns

        def one(carry: Carry, turn: jax.Array) -> tuple[Carry, list[Tree]]:
            gradients = []
            for kind in reversed(range(self.period)):
                carry, own = step(carry, self._number(turn, kind), kind)
                gradients.append(own)
            return carry, gradients[::-1]

        carry = x, carry[1]
        carry, each = lax.scan(one, carry, jnp.arange(turns), reverse=True, unroll=unroll)
        if self.period == 1:
            return carry, each[0], last

        def whole(*kinds: jax.Array) -> jax.Array:
            return jnp.stack(kinds, 1).reshape(self.count, *kinds[0].shape[1:])

        return carry, jax.tree.map(whole, *each), last

    def _number(self, turn: jax.Array, kind: int) -> jax.Array:
        return turn if self.period == 1 else turn * self.period + kind
