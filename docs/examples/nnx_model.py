"""Trains a transformer of Flax's own nnx modules over a tensor axis, saves it and resumes."""

import tempfile

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType

from collective_matmul import overlap_jit
from collective_matmul.layers import Column, Heads, Row, parallelize


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 64, decode=False, rngs=rngs)
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):  # [batch, sequence, 64]
        x += self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 64, rngs=rngs)
        self.block = Block(rngs)
        self.head = nnx.Linear(64, 128, rngs=rngs)

    def __call__(self, tokens):  # [batch, sequence] -> [batch, sequence, 128]
        return self.head(self.block(self.embed(tokens)))


# [plan]
PLAN = {"block.attention": Heads(), "block.up": Column(), "block.down": Row()}
mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))


@overlap_jit
def create(rngs):
    model = parallelize(Model(rngs), PLAN, mesh=mesh)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    state = nnx.state(optimizer)  # moments are sharded like their weights, which JAX does not infer
    shardings = nnx.get_named_sharding(state, mesh)
    nnx.update(optimizer, jax.lax.with_sharding_constraint(state, shardings))
    return model, optimizer


# [step]
@overlap_jit(donate_argnames=("model", "optimizer"))
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


# [checkpoints]
def save(step, model, optimizer):
    state = nnx.state((model, optimizer))
    checkpoints.save(step, args=ocp.args.StandardSave(state))


def restore(step, model, optimizer):  # any model of the same shapes, on any mesh
    state = nnx.state((model, optimizer))
    nnx.update((model, optimizer), checkpoints.restore(step, args=ocp.args.StandardRestore(state)))


# [run]
tokens = jax.random.randint(jax.random.key(0), (4, 65), 0, 128)  # use text here
checkpoints = ocp.CheckpointManager(tempfile.mkdtemp())  # takes the path of your folder
model, optimizer = create(nnx.Rngs(0))
losses = []
for step in range(1, 5):
    losses.append(train_step(model, optimizer, tokens))
    if step == 2:
        save(step, model, optimizer)
print("losses:", *(f"{loss:.3f}" for loss in losses))

again = create(nnx.Rngs(1))  # as a new process would
restore(checkpoints.latest_step(), *again)
for _ in range(3, 5):
    resumed = train_step(*again, tokens)
checkpoints.close()
print("the resumed run has the same loss:", resumed == losses[-1])
