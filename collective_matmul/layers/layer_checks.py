"""Checks of the arguments of layers, before anything is traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from collective_matmul.layers.sharding_context import (
    LocalShards,
    ShardingContext,
    known_axis_size,
)
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.experts.activations import ACTIVATIONS


def sizes(argument: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """`value` as a tuple.

    Raises:
      ValueError: unless it is a whole number of at least 1, or several of them.
    """
    several = tuple(value) if isinstance(value, Sequence) else (value,)
    if not several or any(not isinstance(n, int | np.integer) or n < 1 for n in several):
        raise ValueError(
            f"{argument}={value!r}: expected a whole number of at least 1, or several of them"
        )
    return several


def features(argument: str, value: int | Sequence[int], axis_name: str, devices: int) -> None:
    """Checks that the axis divides `value`, or the first of several sizes.

    Raises:
      ValueError: if it does not.
    """
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    size = sizes[0]
    if size % devices:
        shown = size if len(sizes) == 1 else sizes
        below = size // devices * devices
        nearest = f"{below} or {below + devices}" if below else f"{devices}"
        raise ValueError(
            f"{argument}={shown}: {size} is not divisible by axis {axis_name!r} of size {devices};"
            f" the nearest to it: {nearest}{_copies_instead(argument, sizes, devices)}"
        )


def _copies_instead(argument: str, sizes: tuple[int, ...], devices: int) -> str:
    """Advice for fewer heads, or other features that stay together, than devices."""
    if argument != "out_features" or len(sizes) == 1 or devices % sizes[0]:
        return ""
    return f"; or let several devices compute each: copies={devices // sizes[0]}"


def copies(
    value: int,
    outputs: Sequence[int],
    axis_name: str,
    devices: int | None,
    weight_axis_name: str | None,
) -> None:
    """Checks the number of devices that compute the same features.

    Args:
      value: the number.
      outputs: the output features. The first of several are heads: each device has one. Of a
        single size, each device has an equal part, such as all features of a head.
      axis_name: the mesh axis.
      devices: its size, or None if it is not known.
      weight_axis_name: the second axis of the kernel, or None.

    Raises:
      ValueError: unless there is one part for as many devices, and no second axis.
    """
    size, *others = outputs
    if value < 1 or (devices is not None and not _copies_fit(value, size, bool(others), devices)):
        raise ValueError(
            f"copies={value}: expected the {devices} devices of axis {axis_name!r} over"
            f" out_features={size}, or 1 if there are no fewer of these than devices; the first of"
            " out_features counts, as the heads of nnx.LinearGeneral(features, (heads, head_dim));"
            f" of one size, pass {devices} over the number of heads in it"
        )
    if weight_axis_name is not None:
        raise ValueError(
            f"weight_axis_name={weight_axis_name!r}: kernels with copies={value} are whole on every"
            " device; leave it out"
        )


def _copies_fit(value: int, size: int, are_heads: bool, devices: int) -> bool:
    """Whether parts of `size` features are for `value` devices each."""
    if are_heads:
        return size * value == devices
    return devices % value == 0 and size % (devices // value) == 0


def heads(path: str, module: Any, axis_name: str, mesh: Mesh | None) -> int:
    """Checks that the axis, if its size is known, divides the heads of Flax's attention.

    Returns:
      The number of devices that compute each head of keys and values: 1 unless there are fewer of
      these heads than devices.

    Raises:
      ValueError: if it divides them neither, nor their copies.
    """
    devices = known_axis_size(axis_name, mesh) or 1
    key_value_heads = getattr(module, "num_kv_heads", module.num_heads)
    copies = max(devices // key_value_heads, 1)
    try:
        features("num_heads", module.num_heads, axis_name, devices)
        if devices % key_value_heads:
            features("num_kv_heads", key_value_heads, axis_name, devices)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None
    return copies


def kernel(
    value: jax.Array | Quantized,
    features: tuple[tuple[int, ...], tuple[int, ...]],
    sharded_dimension: int,
    context: ShardingContext,
    weight_shards: WeightShards | None,
) -> None:
    """Checks the shape of a kernel, local or global according to `context`.

    Args:
      value: the kernel.
      features: the global sizes of its input features, and of its output features.
      sharded_dimension: the dimension that the axis of `context` shards.
      context: whether it is local.
      weight_shards: how a second axis shards it too, or None.

    Raises:
      ValueError: if it is not the (shard of the) global kernel, or global and quantized.
    """
    if isinstance(value, Quantized) and not isinstance(context, LocalShards):
        raise ValueError(
            f"kernel: quantized, in a layer outside of a shard_map over axis {context.axis_name!r};"
            " expected a shard, as scales are those of a device; call the layer inside"
            " jax.shard_map over that axis"
        )
    shape = (*features[0], *features[1])
    expected = list(shape)
    expected[sharded_dimension] //= context.parameter_shards
    axes = f"axis {context.axis_name!r}"
    if weight_shards is not None:
        expected[len(features[0]) if weight_shards.dimension else 0] //= weight_shards.axis_size
        axes = f"axes {context.axis_name!r} and {weight_shards.axis_name!r}"
    if value.shape == tuple(expected):
        return
    if isinstance(value, Quantized) and value.array is None:  # It is a matrix.
        count = len(features[0])
        if value.shape == (math.prod(expected[:count]), math.prod(expected[count:])):
            return
    if context.parameter_shards == 1 and weight_shards is None:
        advice = f"the global shape {shape}"
    else:
        advice = (
            f"{tuple(expected)}, this device's shard over {axes} of the global"
            f" {shape}; pass the parameters through shard_map with the in_specs that"
            " nnx.get_partition_spec gives for nnx, partition_specs for linen"
        )
    raise ValueError(f"kernel: shape {value.shape}; expected {advice}")


def input_features(x: Any, expected: tuple[int, ...]) -> None:
    """Checks that x is [..., *K] with features `expected` and at least one dimension before them.

    Raises:
      ValueError: if it is not.
    """
    if x.ndim <= len(expected) or x.shape[-len(expected) :] != expected:
        names = ", ".join(map(str, expected))
        raise ValueError(
            f"x: shape {x.shape}; expected [..., {names}], the features that the kernel here"
            " contracts"
        )


def leading_dimension(argument: str, value: int | None, count: int) -> int | None:
    """`value` counted from the front, for arrays of `count` leading dimensions and one of features.

    Raises:
      ValueError: if it is not a leading dimension.
    """
    if value is None:
        return None
    if not -count - 1 <= value < count or value == -1:
        raise ValueError(
            f"{argument}={value}: there are {count} dimension(s) before the features; expected one"
            f" from {-count - 1} to -2, or from 0 to {count - 1}"
        )
    return value % (count + 1)


def router(
    experts: int,
    choices: int,
    score: str,
    scores: tuple[str, ...],
    groups: int,
    chosen_groups: int,
) -> None:
    """Checks the options of a router.

    Args:
      experts: their number.
      choices: the number of experts of a token.
      score: the name of the score.
      scores: the names there are.
      groups: the number of groups of experts.
      chosen_groups: the number of groups that a token's experts are from.

    Raises:
      ValueError: if they do not fit.
    """
    sizes("experts", experts)
    if not isinstance(choices, int) or not 1 <= choices <= experts:
        raise ValueError(
            f"choices={choices!r}: expected a whole number from 1 to experts={experts}"
        )
    if score not in scores:
        raise ValueError(f"score={score!r}: expected one of {', '.join(map(repr, scores))}")
    if not isinstance(groups, int) or groups < 1 or experts % groups:
        raise ValueError(f"groups={groups!r}: expected a number that divides experts={experts}")
    if not isinstance(chosen_groups, int) or not 1 <= chosen_groups <= groups:
        raise ValueError(
            f"chosen_groups={chosen_groups!r}: expected a whole number from 1 to groups={groups}"
        )
    if chosen_groups * (experts // groups) < choices:
        raise ValueError(
            f"chosen_groups={chosen_groups}: {chosen_groups} of {groups} groups have"
            f" {chosen_groups * (experts // groups)} experts, fewer than choices={choices}; choose"
            " more groups"
        )


def shared_expert(shared_features: int, shared_gate: bool, activation: str) -> None:
    """Checks the options of a shared expert.

    Raises:
      ValueError: if there is none to gate, its features are no size, or it has no such activation.
    """
    if shared_features:
        sizes("shared_features", shared_features)
        if activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(
                f"activation={activation!r}: a shared expert has one of {names}; with"
                " shared_features=0 there is none"
            )
    elif shared_gate:
        raise ValueError(
            f"shared_gate={shared_gate}: shared_features={shared_features}, so there is no shared"
            " expert to gate; give its hidden features"
        )


def distinct_axes(names: Sequence[str]) -> None:
    """Checks the axes of a layer of experts.

    Raises:
      ValueError: if one is named twice.
    """
    if len(set(names)) < len(names):
        raise ValueError(
            f"axis_name, hidden_axis_name, weight_axis_name and data_axis_name: {tuple(names)} has"
            " an axis twice; name each axis once"
        )


def known_axes(argument: str, names: Sequence[str], available: Sequence[str]) -> None:
    """Checks that a mesh has axes.

    Raises:
      ValueError: if it does not.
    """
    for name in names:
        if name not in available:
            raise ValueError(
                f"{argument}={name!r}: the mesh has the axes {tuple(available)}; name one of them"
            )
