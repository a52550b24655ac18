"""Where ZeRO level 3 gathers weights: in matmuls or for each block."""

from __future__ import annotations

from models.parameters.use import Gathers
from train.config.config import Config, MeshSizes
from train.config.experts import gathers_experts


def where_gathered(
    config: Config, sizes: MeshSizes, local_devices: int | None, *, freezes: bool
) -> Gathers:
    """Decides where weights are gathered.

    Args:
      config: the configuration.
      sizes: the mesh.
      local_devices: number of devices of a process; None: all.
      freezes: whether some parameters are not trained.

    Raises:
      ValueError: if it is to be in matmuls, and they cannot.
    """
    if freezes:
        return _beside_frozen(config, sizes)
    return _of_trained(config, sizes, local_devices)


def _of_trained(config: Config, sizes: MeshSizes, local_devices: int | None) -> Gathers:
    """Where weights are gathered if all are trained.

    Rings hide a gather in its own matmul. They are chosen for devices of one process, shards of
    one size, and gradients that travel in no narrower dtype than the weights.

    Raises:
      ValueError: if it is to be in matmuls, and they cannot.
    """
    unsupported = _unsupported_reason(config, sizes)
    if config.weight_gather == "matmuls" and unsupported is not None:
        raise ValueError("weight_gather='matmuls': {}; {}".format(*unsupported))
    if config.weight_gather != "auto":
        return config.weight_gather
    within_process = local_devices is None or sizes.fsdp * sizes.tensor <= local_devices
    possible = unsupported is None and within_process
    return "matmuls" if possible and config.overlap in ("auto", "rewrite-jit") else "blocks"


def _beside_frozen(config: Config, sizes: MeshSizes) -> Gathers:
    """Where weights are gathered beside which others are frozen: in matmuls, whose backward gathers
    them again.

    Raises:
      ValueError: if matmuls cannot gather them.
    """
    unsupported = _unsupported_reason(config, sizes)
    if config.weight_gather == "blocks":
        unsupported = "--weight-gather is blocks", ""
    if unsupported is None:
        return "matmuls"
    raise ValueError(
        f"zero=3: frozen weights are gathered by the matmuls that use them, and {unsupported[0]};"
        " choose --zero 1, which shards what is trained"
    )


def _unsupported_reason(config: Config, sizes: MeshSizes) -> tuple[str, str] | None:
    """Why matmuls cannot gather their weights, and what to do; None if they can."""
    model = config.model
    if sizes.context > 1:
        return (
            f"with mesh.context={sizes.context}, weights are sharded over two axes, and matmuls"
            " gather them over one"
        ), "leave out --weight-gather"
    if model.features % sizes.fsdp:
        return (
            f"mesh.fsdp={sizes.fsdp} does not divide model.features={model.features}"
        ), "choose a divisor, or leave out --weight-gather"
    if not gathers_experts(config, sizes):
        return (
            f"mesh.fsdp={sizes.fsdp} does not divide model.hidden_features={model.hidden_features}"
            " of experts"
        ), "choose a divisor, or leave out --weight-gather"
    if model.key_value_copies(sizes.tensor) > 1:
        return (
            f"mesh.tensor={sizes.tensor} is more than model.num_key_value_heads="
            f"{model.num_key_value_heads}, whose weights then are whole on every device"
        ), "leave out --weight-gather, or make --mesh.tensor smaller"
    if (config.compute_dtype, config.gradient_dtype) == ("float32", "bfloat16"):
        return (
            "gradients travel in gradient_dtype='bfloat16' only with compute_dtype='bfloat16'"
        ), "choose one of them otherwise, or leave out --weight-gather"
    return None
