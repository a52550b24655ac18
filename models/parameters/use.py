"""Operations on parameters where a model uses them, and on their gradients.

A trainer that shards parameters gives a `ParameterUse` to the model. The model applies it to the
parameters of one block at a time, so what it communicates can overlap with other blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
from jax import lax

from collective_matmul import Quantized

#: Parameters of a part of the model, as an `nnx.State` with their metadata.
Tree = Any
Gathers = Literal["blocks", "matmuls"]


class ParameterUse(Protocol):
    """Makes weights of parameters, and gradients of parameters of those of weights. Hashable."""

    @property
    def gathers(self) -> Gathers | None:
        """Where the weights of blocks are gathered, for the forward and again for the backward:
        "blocks", all of a block before it is computed; "matmuls", by its linear layers; None if
        they are not."""
        ...

    def weights(self, parameters: Tree, gathered: Tree | None, *, whole: bool = False) -> Tree:
        """The weights that a part of the model computes with.

        Args:
          parameters: its parameters, local, which may be typed as varying over any axes.
          gathered: the same with weights that were made before, or None. Some may be
            `Quantized`, as in the result; also of shards, which are still to be gathered.
          whole: the part does not gather weights itself, as linear layers can.
        """
        ...

    def gradients(self, gradients: Tree, *, whole: bool = False) -> Tree:
        """The gradients of the parameters from those of the weights, the transpose but for dtypes:
        they become float32 where they leave the model. All are arrays."""
        ...


@dataclass(frozen=True)
class Unchanged:
    """The use of parameters as they are. JAX sums their gradients as their types say."""

    gathers: Gathers | None = None

    def weights(self, parameters: Tree, gathered: Tree | None, *, whole: bool = False) -> Tree:
        """The parameters, with copies in 8 bits if they were gathered with them."""
        del whole
        return parameters if gathered is None else jax.tree.map(_with_copies, parameters, gathered)

    def gradients(self, gradients: Tree, *, whole: bool = False) -> Tree:
        """The gradients."""
        del whole
        return arrays_of(gradients)


def _with_copies(parameter: jax.Array, gathered: jax.Array | Quantized) -> Any:
    quantized = isinstance(gathered, Quantized)
    return gathered.with_array(parameter) if quantized else parameter


def arrays_of(weights: Tree) -> Tree:
    """Weights, or gradients of them, as arrays: of each `Quantized` its array, which has the
    gradient."""

    def array_of(weight: jax.Array | Quantized) -> jax.Array:
        return weight.array if isinstance(weight, Quantized) else weight

    return jax.tree.map(array_of, weights, is_leaf=lambda w: isinstance(w, Quantized))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def used(parameters: Tree, gathered: Tree | None, use: ParameterUse, whole: bool) -> Tree:
    """``use.weights(parameters, gathered)``, with the gradient that `use` defines."""
    return use.weights(parameters, gathered, whole=whole)


def _forward(
    parameters: Tree, gathered: Tree | None, use: ParameterUse, whole: bool
) -> tuple[Tree, None]:
    return use.weights(parameters, gathered, whole=whole), None


def _backward(use: ParameterUse, whole: bool, _: None, gradients: Tree) -> tuple[Tree, None]:
    return as_float32(use.gradients(gradients, whole=whole)), None


used.defvjp(_forward, _backward)


def as_float32(gradients: Tree) -> Tree:
    """Gradients in the dtype of parameters."""
    return jax.tree.map(lambda leaf: leaf.astype("float32"), gradients)


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Returns the array, typed as varying over mesh axes too."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x
