"""Where the experts of a model are on the mesh.

Experts may be divided over the tensor axis, over fsdp, whose devices have sequences of their own,
or over both, while attention uses the tensor axis alone. Devices along these axes exchange tokens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from models.blocks.rematerialization import recomputes_feed_forward
from models.config import LlamaConfig
from train.config.config import Config, MeshSizes

_AXES = {"tensor": ("tensor",), "fsdp": ("fsdp",), "both": ("fsdp", "tensor"), "none": ()}
#: Backends that exchange tokens, of those that `Config.overlap` can name.
_BACKENDS = ("xla", "ring", "ring_two_way", "ring_direct")


def is_expert(name: str) -> bool:
    """Whether a parameter has the matrices of experts: [..., experts, rows, columns]."""
    return "experts.w_" in name


def is_expert_bias(name: str) -> bool:
    """Whether a parameter has the biases of experts: [..., experts, features]."""
    return "experts.b_" in name


def expert_dimension(name: str) -> int | None:
    """The dimension of a parameter that counts experts, from the end; None without one.

    Devices that it is divided over have different experts, which stay where they are.
    """
    return -3 if is_expert(name) else -2 if is_expert_bias(name) else None


def expert_axes(config: Config) -> tuple[str, ...]:
    """The axes that divide experts, outermost first; none for a model without experts."""
    return () if config.model.num_experts is None else _AXES[config.expert_axes]


def expert_devices(config: Config, sizes: MeshSizes) -> int:
    """The number of devices that experts are divided over."""
    return math.prod(getattr(sizes, axis) for axis in expert_axes(config))


def gathers_experts(config: Config, sizes: MeshSizes) -> bool:
    """Whether the expert op can gather shards of weights over fsdp, if there are any: it divides
    the rows of each matrix."""
    if config.model.num_experts is None or "fsdp" in expert_axes(config):
        return True
    return config.model.hidden_features % (hidden_devices(config, sizes) * sizes.fsdp) == 0


def hidden_devices(config: Config, sizes: MeshSizes) -> int:
    """The number of devices that the hidden features of each expert are divided over."""
    return 1 if config.expert_hidden_axis is None else getattr(sizes, config.expert_hidden_axis)


def expert_implementation(overlap: str) -> tuple[str, ...] | None:
    """The implementation that exchanges tokens, for a value of `Config.overlap`; None chooses."""
    return tuple(name for name in overlap.split(",") if name in _BACKENDS) or None


def on_tensor_axis(config: Config) -> LlamaConfig:
    """The model with those sizes of its feed-forward that the tensor axis has to divide."""
    model = config.model
    if model.num_experts is None or "tensor" in expert_axes(config):
        return model
    # The numbers of heads, which it divides anyway, stand for a size that it does not shard.
    hidden = model.hidden_features if config.expert_hidden_axis else model.num_heads
    changes = dict(num_experts=None, num_experts_per_token=None, hidden_features=hidden)
    return dataclasses.replace(model, **changes)


def check_experts(config: Config, sizes: MeshSizes) -> None:
    """Checks the settings of experts.

    Raises:
      ValueError: if they do not fit each other, the model or the mesh.
    """
    _check_values(config)
    if config.model.num_experts is None:
        _check_without_experts(config)
        return
    if config.expert_hidden_axis in expert_axes(config):
        raise ValueError(
            f"expert_hidden_axis={config.expert_hidden_axis!r}: the axis divides experts already,"
            f" by expert_axes={config.expert_axes!r}; add --expert-axes fsdp or none, or leave out"
            " --expert-hidden-axis"
        )
    experts, devices = config.model.num_experts, expert_devices(config, sizes)
    if experts % devices:
        product = " × ".join(f"mesh.{axis}={getattr(sizes, axis)}" for axis in expert_axes(config))
        raise ValueError(
            f"model.num_experts={experts} is not divisible by {product}, over which"
            f" expert_axes={config.expert_axes!r} divides them; choose other sizes of the mesh, or"
            " another --expert-axes"
        )
    if config.overlap in ("rewrite", "rewrite-jit"):
        raise ValueError(
            f"overlap={config.overlap!r}: a model with experts (model.num_experts={experts}) calls"
            " the ops of this library itself; choose auto, or names of backends"
        )


def worst_case_bytes(config: Config, sizes: MeshSizes) -> int:
    """Bytes of the hidden features of experts that a device has room for, of one layer and one
    microbatch: those of gate and up, for all pairs of a token and an expert of all devices that
    exchange tokens, since one device may get all of them."""
    model, hidden = config.model, hidden_devices(config, sizes)
    groups = sizes.devices * config.gradient_accumulation_steps
    tokens = config.batch_size * config.sequence_length // groups
    rows = expert_devices(config, sizes) * hidden * tokens
    rows *= model.num_experts_per_token or 0
    width = model.hidden_features // hidden
    return 2 * rows * width * np.dtype(config.compute_dtype).itemsize


def describe_experts(config: Config, sizes: MeshSizes, active_parameters: int) -> list[str]:
    """Where experts are, and what they have room for, as lines to print; none without experts.

    Args:
      config: the configuration.
      sizes: the mesh.
      active_parameters: the number of parameters that compute with one token.
    """
    model, axes = config.model, expert_axes(config)
    if model.num_experts is None:
        return []
    where = " × ".join(f"{axis}={getattr(sizes, axis)}" for axis in axes) or "no axis"
    if config.expert_hidden_axis:
        axis = config.expert_hidden_axis
        where += f", their hidden features over {axis}={getattr(sizes, axis)}"
    lines = [
        f"experts: {model.num_experts} in each layer, {model.num_experts_per_token} for each token,"
        f" divided over {where}; {active_parameters:,} parameters are active"
    ]
    room = f"room for all tokens at one device: {worst_case_bytes(config, sizes):,} bytes"
    if config.recompute_expert_hidden or recomputes_feed_forward(config.remat):
        lines.append(f"hidden features of experts are computed again; else {room} in each layer")
    else:
        lines.append(f"hidden features of experts are kept, with {room} in each layer")
    if config.gradient_accumulation_steps > 1 and balance_weight(config):
        lines.append(
            "the loss that balances experts is of all microbatches together, which takes a forward"
            " more; --balance-loss-weight 0 leaves it out"
        )
    return lines


def balance_weight(config: Config) -> float:
    """The weight of the loss that balances experts."""
    weight = config.balance_loss_weight
    return config.model.router_loss_weight if weight is None else weight


def _check_values(config: Config) -> None:
    """Raises ValueError for values that no model can have."""
    for name, allowed in (
        ("expert_axes", tuple(_AXES)),
        ("expert_hidden_axis", ("tensor", None)),
    ):
        if getattr(config, name) not in allowed:
            *most, last = map(str, allowed)
            raise ValueError(
                f"{name}={getattr(config, name)!r}: expected {', '.join(most)} or {last}"
            )
    for name in ("balance_loss_weight", "router_z_loss_weight"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: expected 0 or a positive number")


def _check_without_experts(config: Config) -> None:
    """Raises ValueError for settings of experts."""
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if field.name in _SETTINGS and value != field.default:
            raise ValueError(
                f"{field.name}={value!r}: the model has no experts; leave it out, or choose a"
                " --preset with experts, such as mixtral-8x7b"
            )


_SETTINGS = (
    "expert_axes", "expert_hidden_axis", "recompute_expert_hidden", "balance_loss_weight",
    "router_z_loss_weight",
)  # fmt: skip
