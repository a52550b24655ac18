"""Which matmuls of a run are in rings of this library, and which collectives are XLA's."""

from __future__ import annotations

from train.config.config import Config
from train.plan.shapes import Shapes

#: GPUs that NVLink joins, and that a process has.
GPUS_OF_A_NODE = 8
#: Values of `Config.overlap` that leave all collective matmuls to XLA.
_WITHOUT_RINGS = ("xla",)


def leaves_matmuls_to_xla(config: Config) -> bool:
    """Whether all collective matmuls are XLA's."""
    return config.overlap in _WITHOUT_RINGS


def gathers_in_matmuls(shapes: Shapes) -> bool:
    """Whether rings gather the weights that they multiply, as `ModelFunctions` decides."""
    config, sizes = shapes.config, shapes.sizes
    if shapes.training.freezes:  # Nothing else gathers what is frozen.
        return True
    if config.weight_gather != "auto":
        return config.weight_gather == "matmuls"
    within = sizes.fsdp * sizes.tensor <= GPUS_OF_A_NODE and sizes.context == 1
    divides = config.model.features % sizes.fsdp == 0
    return within and divides and config.overlap in ("auto", "rewrite-jit")
