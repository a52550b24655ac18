"""Trains a transformer of Flax's own linen modules over a tensor axis, saves it and resumes."""

import tempfile

import jax
import optax
import orbax.checkpoint as ocp
from flax import linen
from flax.training.train_state import TrainState
from jax.sharding import AxisType

from collective_matmul import overlap_jit
from collective_matmul.layers import Column, Heads, Row, parallelize


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):  # [batch, sequence, 64]
        mask = linen.make_causal_mask(x[..., 0])
        x += linen.MultiHeadDotProductAttention(8, name="attention")(linen.RMSNorm()(x), mask=mask)
        hidden = linen.gelu(linen.Dense(256, name="up")(linen.RMSNorm()(x)))
        return x + linen.Dense(64, name="down")(hidden)


class Model(linen.Module):
    @linen.compact
    def __call__(self, tokens):  # [batch, sequence] -> [batch, sequence, 128]
        x = linen.Embed(128, 64)(tokens)
        return linen.Dense(128)(Block(name="block")(x))


# [plan]
PLAN = {"block.attention": Heads(), "block.up": Column(), "block.down": Row()}
mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))
module = parallelize(Model(), PLAN, mesh=mesh)
tokens = jax.random.randint(jax.random.key(0), (4, 65), 0, 128)  # use text here


@overlap_jit
def create(key):
    params = module.init(key, tokens[:, :-1])["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adamw(1e-2))
    shardings = module.shardings({"params": params})["params"]
    constrain = jax.lax.with_sharding_constraint  # moments are sharded like their weights
    opt_state = optax.tree_map_params(state.tx, constrain, state.opt_state, shardings)
    return state.replace(opt_state=opt_state)


# [step]
@overlap_jit(donate_argnums=0)
def train_step(state, tokens):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


# [run]
checkpoints = ocp.CheckpointManager(tempfile.mkdtemp())  # takes the path of your folder
state, losses = create(jax.random.key(0)), []
for step in range(1, 5):
    state, loss = train_step(state, tokens)
    losses.append(loss)
    if step == 2:
        checkpoints.save(step, args=ocp.args.StandardSave(state))
print("losses:", *(f"{loss:.3f}" for loss in losses))

state = create(jax.random.key(1))  # as a new process would
arguments = ocp.args.StandardRestore(state)
state = checkpoints.restore(checkpoints.latest_step(), args=arguments)
for _ in range(3, 5):
    state, resumed = train_step(state, tokens)
checkpoints.close()
print("the resumed run has the same loss:", resumed == losses[-1])
