"""Programs over Explicit mesh axes with weights that a second axis shards, as FSDP does.

Legend of shapes as in `tests.rewrite.explicit_programs`. The second axis is "data", which shards
the batch, or "fsdp" in a mesh (2, 2, 2) over "data", "fsdp" and "tensor".
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tests.rewrite.explicit_programs import (
    DOWN,
    ROWS,
    SCALE,
    UP,
    WHOLE,
    B,
    D,
    ExplicitForm,
    F,
    H,
    K,
    N,
    S,
    X,
    all_reduced,
    layers,
    llama_block,
    mlp,
    mlp_by_types,
)

AXES, BATCH = ("data", "fsdp", "tensor"), ("data", "fsdp")
#: Weights that are sharded over both axes.
UP_SHARDS, DOWN_SHARDS = P("data", "tensor"), P("tensor", "data")


def fsdp(x, up, down):
    """Weights are sharded over the axis of the batch, and gathered to be used."""
    up, down = reshard(up, UP), reshard(down, DOWN)
    return mlp(x, up, down)


def fsdp_by_types(x, up, down):
    """Types of the results ask for the gathers of weights as well."""
    return mlp_by_types(x, up, down)


def fsdp_rounded(x, up, down):
    """Weights are cast before they are gathered, or after."""
    up = reshard(up.astype(x.dtype), UP)
    down = reshard(down, DOWN).astype(x.dtype)
    return mlp(x, up, down)


def fsdp_block(x, first, wq, wk, wv, wo, second, gate, up, down):
    """A Llama block with sharded weights."""
    heads = P(None, "tensor", None)
    weights = [reshard(w, heads) for w in (wq, wk, wv)]
    weights += [reshard(wo, P("tensor", None, None)), second]
    weights += [reshard(gate, UP), reshard(up, UP), reshard(down, DOWN)]
    return llama_block(x, first, *weights)


def fsdp_axis(x, up, down):
    """Two axes shard the batch, and one of them the weights."""
    up, down = reshard(up, UP), reshard(down, DOWN)
    h = jax.nn.gelu(reshard(x, P(BATCH)) @ up)
    return jnp.dot(h, down, out_sharding=P(BATCH, "tensor"))


def fsdp_axis_by_types(x, up, down):
    h = jax.nn.gelu(jnp.dot(x, up, out_sharding=P(BATCH, None, "tensor")))
    return jnp.dot(h, down, out_sharding=P(BATCH, "tensor"))


def fsdp_of_replicated(x, up, down):
    """The axis that shards the weights does not shard the batch."""
    up, down = reshard(up, UP), reshard(down, DOWN)
    return mlp(x, up, down)


def fsdp_all_reduced(x, up, down):
    up, down = reshard(up, UP), reshard(down, DOWN)
    return all_reduced(x, up, down)


def fsdp_used_elsewhere(x, up, down):
    """The sum needs the whole weight."""
    whole = reshard(up, UP)
    return mlp(x, whole, reshard(down, DOWN)) + jnp.sum(jnp.sin(whole))


def fsdp_in_both(x, up, down):
    """An all-reduce needs the weight whole that another site gathers."""
    h = jax.nn.gelu(reshard(x, WHOLE) @ reshard(up, UP))
    down = reshard(down, DOWN)
    return jnp.dot(h, down, out_sharding=ROWS), jnp.dot(jnp.sin(h), down, out_sharding=WHOLE)


def fsdp_alone(x, w):
    return x @ reshard(w, P())


def fsdp_alone_by_types(x, w):
    return jnp.dot(x, w, out_sharding=WHOLE)


_FSDP = (X, ((D, F), UP_SHARDS), ((F, D), DOWN_SHARDS))
_FSDP_BLOCK = (
    X,
    SCALE,
    ((D, N, H), P("data", "tensor")),
    ((D, K, H), P("data", "tensor")),
    ((D, K, H), P("data", "tensor")),
    ((N, H, D), P("tensor", None, "data")),
    SCALE,
    *_FSDP[1:2],
    *_FSDP[1:],
)
_IN_COLUMNS = (
    ((2 * B, S, D), P(BATCH, "tensor")),
    ((D, F), P(None, ("tensor", "fsdp"))),
    ((F, D), P("tensor", "fsdp")),
)
_AXIS_OF_ITS_OWN = (
    ((2 * B, S, D), P(BATCH, "tensor")),
    ((D, F), P("fsdp", "tensor")),
    ((F, D), P("tensor", "fsdp")),
)

#: A gather of a weight is a site that the loop of another executes. Gradients of weights that are
#: summed over two axes at once are left alone, by each axis.
FORMS = {
    "fsdp": ExplicitForm(fsdp, _FSDP, 4, 10),
    "fsdp_by_types": ExplicitForm(fsdp_by_types, _FSDP, 4, 10),
    "fsdp_rounded": ExplicitForm(fsdp_rounded, _FSDP, 4, 10),
    "fsdp_layers": ExplicitForm(functools.partial(layers, fsdp), _FSDP, 4, 12),
    "fsdp_block": ExplicitForm(fsdp_block, _FSDP_BLOCK, 11, 29),
    "fsdp_axis": ExplicitForm(fsdp_axis, _AXIS_OF_ITS_OWN, 4, 8, alone=(0, 4), axes=AXES),
    "fsdp_axis_by_types": ExplicitForm(
        fsdp_axis_by_types, _AXIS_OF_ITS_OWN, 4, 8, alone=(0, 4), axes=AXES
    ),
    "fsdp_in_columns": ExplicitForm(fsdp_axis, _IN_COLUMNS, 4, 8, alone=(0, 4), axes=AXES),
    "fsdp_of_replicated": ExplicitForm(
        fsdp_of_replicated,
        (X, ((D, F), P("fsdp", "tensor")), ((F, D), P("tensor", "fsdp"))),
        4,
        10,
        axes=AXES,
    ),
    "fsdp_alone": ExplicitForm(fsdp_alone, (((B, S, D), WHOLE), ((D, F), WHOLE)), 1, 2),
    "fsdp_alone_by_types": ExplicitForm(
        fsdp_alone_by_types, (((B, S, D), WHOLE), ((D, F), WHOLE)), 1, 2
    ),
}

#: Forms with one difference, and what of them is still replaced.
NEAR_MISSES = {
    "fsdp": ExplicitForm(
        fsdp_all_reduced, _FSDP, 3, 0, "its matmul belongs to another site, which sums over devices"
    ),
    "fsdp_in_both": ExplicitForm(
        fsdp_in_both, _FSDP, 5, 0, "its matmul belongs to another site, which sums over devices"
    ),
    "fsdp_used_elsewhere": ExplicitForm(
        fsdp_used_elsewhere, _FSDP, 3, 0, "its matmul contracts the gathered dimension"
    ),
    "fsdp_in_columns": ExplicitForm(
        fsdp_axis,
        (_IN_COLUMNS[0], ((D, F), P(None, ("fsdp", "tensor"))), _IN_COLUMNS[2]),
        3,
        0,
        "a dimension is sharded over 'fsdp' and other mesh axes at once",
        axes=AXES,
    ),
}
