"""Whether a step begins with the weights in the compute dtype that the step before has written."""

from __future__ import annotations

from models.parameters.adapters import Training
from train.config.config import Config, MeshSizes


def keeps_weights(config: Config, sizes: MeshSizes) -> bool:
    """Whether a state has parameters in the compute dtype too.

    The optimizer writes them in the pass that updates the parameters. If the step that uses them
    made them, that would be a pass of its own, which reads the parameters once more. They are kept
    where this costs no memory: where weights are not gathered over devices, and most memory is in
    use when all weights stand beside the activations of all blocks. With remat that moment is
    later, when a step that makes its weights has freed them.

    Args:
      config: the configuration.
      sizes: the mesh.
    """
    gathers = config.zero > 0 and sizes.weight_shards > 1
    freezes = Training(config.lora, config.freeze).freezes
    if gathers or freezes or config.remat != "none" or config.compute_dtype == "float32":
        return False
    # Programs that `overlap` rewrites make their weights, and quantize them, themselves.
    return config.overlap != "rewrite-jit" and not (config.overlap == "rewrite" and config.fp8)
