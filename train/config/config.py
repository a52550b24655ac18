"""The configuration of a run: dataclasses that the command line fills in.

A field is a flag: ``Config.mesh.tensor`` is ``--mesh.tensor``. See `train.config.checks` for the
values that fit together, and `train.config.presets` for defaults.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tyro.conf import Fixed, Suppress

from models.blocks.rematerialization import Remat
from models.config import LlamaConfig
from models.parameters.adapters import LoraConfig
from models.parameters.fp8_layers import DEFAULT_FP8_LAYERS
from train.config.optimizers import OptimizerConfig

#: Devices of a run on a machine without GPUs that names no number.
SIMULATED_DEVICES = 8
#: ZeRO levels.
Zero = Literal[0, 1, 2, 3]
WeightGather = Literal["auto", "matmuls", "blocks"]
ExpertAxes = Literal["tensor", "fsdp", "both", "none"]


class MeshSizes(NamedTuple):
    """The sizes of the axes of a mesh. A context axis of one device is none: the mesh does not have
    it."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self)

    @property
    def flags(self) -> str:
        """The sizes as the configuration names them."""
        return " × ".join(f"mesh.{name}={size}" for name, size in self.by_axis.items())

    @property
    def by_axis(self) -> dict[str, int]:
        """The sizes by axis, from the outermost to the innermost."""
        sizes = {"data": self.data, "fsdp": self.fsdp}
        if self.context > 1:
            sizes["context"] = self.context
        return sizes | {"tensor": self.tensor}

    @property
    def weight_shards(self) -> int:
        """The number of devices that ZeRO shards weights over, beside those of the tensor axis."""
        return self.fsdp * self.context

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.by_axis.items())


ONE_DEVICE = MeshSizes()


@dataclass(frozen=True)
class MeshConfig:
    """The mesh of devices, data × fsdp × context × tensor. A size of 0 takes what fits."""

    data: int = 0
    """Number of replicas; 0: as many as the remaining devices allow, with --zero one."""
    fsdp: int = 0
    """Number of devices that --zero shards weights over, each with sequences of its own; 0: one,
    with --zero as many as the remaining devices allow."""
    tensor: int = 0
    """Number of devices that share one copy and each sequence; 0: on known GPUs the number with the
    shortest predicted step, else as many as divide the model."""
    context: int = 1
    """Number of parts of each sequence, for long ones: devices with different tokens, which attend
    to each other's. --zero shards weights over them too. 0 and 1: sequences are whole."""


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes. Under Slurm, Open MPI and Kubernetes they find each other."""

    coordinator_address: str | None = None
    """HOST:PORT where process 0 listens."""
    num_processes: int | None = None
    """Number of processes of the run; 1: this one alone, whatever a launcher says."""
    process_id: int | None = None
    """Number of this process, from 0."""
    heartbeat_timeout_seconds: int = 30
    """Time without a sign of life after which a process counts as dead and the others end."""
    tensor_across_processes: bool = False
    """Allow a tensor axis that spans processes, where rings cannot overlap. What replaces them are
    kernels that address peers' memory, on Hopper GPUs of one node."""


@dataclass(frozen=True)
class Config:
    """Train a Llama on text with collective matmuls."""

    model: LlamaConfig
    config: str | None = None
    """One file with the configuration, as --print-config writes it; flags override what it says. Or
    a Hugging Face config.json, or its folder, for its model with random weights; without --preset,
    the learning rate, warm-up and sequence length follow from the model."""
    preset: str = "debug"
    """Source of the other defaults: debug, or a published model, such as llama3-8b or qwen3-8b."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: str = ""
    """Parameters that are not trained, as patterns separated by commas of their names without the
    number of the layer, such as embedding or layers.attention.*; default: all are."""
    steps: int = 1000
    """Optimizer steps of the whole run, including those before a resume; a resumed run keeps its
    own."""
    batch_size: int = 8
    """Sequences per optimizer step, over all devices; a resumed run keeps its own."""
    sequence_length: int = 8192
    """Tokens per sequence."""
    gradient_accumulation_steps: int = 1
    """Microbatches per optimizer step, computed one after the other."""
    overlap: str = "auto"
    """Backend of the collective matmuls: auto chooses one for each shape; a name, such as ring or
    xla, requires that backend; several names separated by commas take the first that can; rewrite
    trains a model of JAX's own collectives, with its whole step passed to
    collective_matmul.overlap; rewrite-jit trains one under jax.jit without collectives, over mesh
    axes of type Explicit, with its loss passed to it."""
    fp8: Literal["tensorwise", "rowwise", "blockwise"] | None = None
    """Recipe by which operands of the matmuls are quantized to 8 bits; default: they are not."""
    fp8_layers: str = ",".join(DEFAULT_FP8_LAYERS)
    """Layers with --fp8, as patterns separated by commas of layers.attention.projection,
    layers.attention.output, layers.feed_forward, experts and head."""
    zero: Zero = 0
    """ZeRO level, over the fsdp axis: 1 shards parameters and optimizer state, 2 gradients too, 3
    weights where they are used too. Weights are gathered in --compute-dtype. If this is not given,
    a resumed run keeps its own; a new one with --mesh.fsdp over 1 has level 3, or 1 beside frozen
    weights; any other the default."""
    weight_gather: WeightGather = "auto"
    """Where weights are gathered with --zero 3: in the loop of each matmul (matmuls), or block by
    block, one block ahead (blocks); auto: in matmuls if --overlap auto may choose rings for it."""
    expert_axes: ExpertAxes = "tensor"
    """Axes of the mesh that divide the experts of a model: tensor; fsdp, whose devices then
    exchange tokens instead of weights, with or without --zero; both; or none."""
    expert_hidden_axis: Literal["tensor"] | None = None
    """Axis that divides the hidden features of each expert, for few large experts; it cannot divide
    the experts too. Default: none does."""
    recompute_expert_hidden: bool = False
    """Compute the hidden features of experts again in the backward. Kept, they take room for the
    worst case that a router can choose. --remat projections, attention and full do so too."""
    balance_loss_weight: float | None = None
    """Weight of the loss that balances experts over the tokens of a step; default: that of the
    model. More than 0 with gradient accumulation costs a forward more: the loss is of all
    microbatches together."""
    router_z_loss_weight: float = 0.0
    """Weight of the loss that keeps the logits of routers small."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over the data and fsdp axes."""
    remat: Remat = "none"
    """What the backward recomputes: nothing (none), all but results of matmuls and attention
    (dots), the feed-forward and all but results of attention and its projections (projections), all
    but those of attention (attention), or all (full)."""
    attention: Literal["auto", "flash3", "cudnn", "xla"] = "auto"
    """Kernel of attention: auto takes the one that was measured to be fastest and is installed; a
    name requires that kernel."""
    context_attention: str = "auto"
    """What sends keys and values over the context axis: xla, gather, ulysses or ring, or several
    separated by commas, of which the first that can does; auto: those that --overlap names, or else
    a choice for each shape."""
    loss_chunk: int | None = None
    """Tokens of a sequence whose logits exist at one time; the backward computes them again. 0:
    all. Default: all if they take at most 4 GiB on a device, else as many as take 1 GiB."""
    scan_layers: int = 0
    """Layers per iteration of a loop over stacked layers, so that the time to compile does not
    depend on their number; 0: one program of all layers."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations and of weights where they are used; master weights are float32."""
    seed: int = 0
    """Random seed of the initial weights and of the order of the data."""
    data: str | None = None
    """File or glob: .parquet, .jsonl or .json, with a document in each row or line, or text, with
    one in each file; all but .parquet also as .gz; default: the Python manual."""
    text_column: str = "text"
    """Column of Parquet, or key of JSON lines, that has the text."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer.json; default: bytes."""
    separate_documents: bool = False
    """Keep documents in one sequence apart: attention does not cross their ends, and positions
    count from 0 in each."""
    chat: bool = False
    """--data and --eval-data have conversations: JSON lines with "messages", written by the chat
    template beside --tokenizer. They are kept apart, and the loss is that of answers alone."""
    chat_template_kwargs: str = "{}"
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""
    eval_data: str | None = None
    """File or glob of held-out text, read as --data is; default: none is evaluated."""
    eval_interval: int = 100
    """Steps between evaluations. The last step is always evaluated."""
    eval_batches: int | None = None
    """Number of batches of the held-out text to evaluate, from its beginning; default: all."""
    init_from: str | None = None
    """Weights that the run begins with: a directory of checkpoints, one step_N in it, or a folder
    of a Hugging Face model, which says what the model and its tokenizer are."""
    checkpoint_dir: str | None = None
    """Directory of the checkpoints; default: none are saved."""
    save_interval: int = 100
    """Steps between checkpoints. The last step is always saved."""
    max_to_keep: int = 3
    """Number of checkpoints to keep; older ones are deleted."""
    eval_only: bool = False
    """Evaluate the weights of --init-from, or the newest checkpoint in --checkpoint-dir, on
    --eval-data, and stop."""
    resume: bool = False
    """Continue from the newest checkpoint in --checkpoint-dir."""
    resume_step: int | None = None
    """Continue from the checkpoint of this step; later ones are moved into the folder superseded
    when the run first saves."""
    log_interval: int = 10
    """Steps between log lines."""
    log_file: str | None = None
    """File for a copy of the log as JSON lines."""
    tensorboard: str | None = None
    """Directory for a copy of the log in TensorBoard's format."""
    wandb: bool = False
    """Copy the log to Weights & Biases; its variables apply, such as WANDB_PROJECT, WANDB_MODE."""
    profile: str | None = None
    """FIRST:LAST, the steps to record with jax.profiler."""
    profile_dir: str = "profile"
    """Directory of the profile."""
    cpu_devices: int | None = None
    """Number of simulated devices on a machine without GPUs; default: that in XLA_FLAGS, or 8."""
    print_config: bool = False
    """Print the configuration as JSON and stop."""
    dry_run: bool = False
    """Print bytes per device and the collective matmuls, and stop; the mesh may have any size."""
    plan: bool = False
    """Print the fastest meshes, --zero, --remat and microbatches that fit --devices, with their
    predicted step times, and stop. Flags that are given are kept."""
    tune: bool = False
    """Measure the collective matmuls of one step on the GPUs here with every backend, save the
    table from which later runs choose, and stop."""
    tune_table: str | None = None
    """File of that table; default: the one in the user's cache, which later runs read."""
    verbose: bool = False
    """List, in a dry run, the gathers and sums that are left alone, each with the reason."""
    device: Literal["A100", "H100", "H200"] | None = None
    """GPU that a plan or a dry run predicts for; default: those of this machine, or H200."""
    devices: int | None = None
    """Number of GPUs that a plan is for; default: those of this machine."""
    plan_network: float = 50.0
    """GB/s that each GPU sends to other nodes, for predicted step times."""
    given: Suppress[Fixed[frozenset[str]]] = field(default=frozenset(), compare=False, repr=False)
    """No flag: the fields that somebody set, by dotted name, whose values a plan keeps."""

    def __post_init__(self) -> None:
        if self.resume_step is not None:
            object.__setattr__(self, "resume", True)

    @property
    def network_bytes(self) -> float:
        """Bytes per second that each GPU sends to other nodes."""
        return self.plan_network * 1e9

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """First and last step to profile, or None.

        Raises:
          ValueError: if `profile` is not two step numbers in order.
        """
        if self.profile is None:
            return None
        first, _, last = self.profile.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(
                f"profile={self.profile!r}: expected FIRST:LAST, two steps from 1 on, as in 10:13"
            )
        return int(first), int(last)

    def to_json(self) -> dict[str, Any]:
        """The configuration as nested dictionaries of plain values."""
        values = dataclasses.asdict(self)
        del values["given"]
        return values
