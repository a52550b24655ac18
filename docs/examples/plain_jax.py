"""Overlaps the collectives of a training step that was written with `jax.shard_map` alone."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, overlap, overlap_jit


# [model]
def feed_forward(x, weights):  # local shards: x [batch, S/D, K], up [K, F/D], down [F/D, K]
    gathered = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
    hidden = jax.nn.gelu(gathered @ weights["up"])
    return jax.lax.psum_scatter(hidden @ weights["down"], "tensor", scatter_dimension=1, tiled=True)


def local_loss(layers, x, y):
    for weights in layers:
        x = x + feed_forward(x, weights)
    return jax.lax.pmean(jnp.mean((x - y) ** 2), "tensor")


mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))
sequence = P(None, "tensor")
layer_specs = {"up": P(None, "tensor"), "down": P("tensor")}
loss = jax.shard_map(
    local_loss, mesh=mesh, in_specs=([layer_specs] * 2, sequence, sequence), out_specs=P()
)

# [step]
overlapped = overlap(loss, require=4)  # two sites in each of two layers


@overlap_jit(donate_argnums=0)
def train_step(layers, x, y):
    value, gradients = jax.value_and_grad(overlapped)(layers, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), value


# [explain]
def layer(key, features=64, hidden=256):
    keys = jax.random.split(key)
    up = jax.random.normal(keys[0], (features, hidden)) / features**0.5
    return {"up": up, "down": jax.random.normal(keys[1], (hidden, features)) / hidden**0.5}


layers = [layer(key) for key in jax.random.split(jax.random.key(0), 2)]
x, y = jax.random.normal(jax.random.key(1), (2, 4, 128, 64))  # [batch, sequence, features]
print(explain(loss)(layers, x, y))

# [run]
expected = jax.jit(loss)(layers, x, y)
for step in range(3):
    layers, value = train_step(layers, x, y)
    if step == 0:  # equal up to the order of sums
        print(f"loss {value:.4f}, of the plain code {expected:.4f}")
print(f"loss {value:.4f} after three steps")
