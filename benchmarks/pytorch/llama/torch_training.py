"""PyTorch's training step: FSDP2, or tensor and sequence parallelism as torchtitan places it.

Experts are divided over the devices of FSDP2, which keeps its hands off them.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as remat
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.pytorch import TRAINING_NAMES, float8_recipe
from benchmarks.pytorch.llama.torch_expert_blocks import TorchExpertFeedForward
from benchmarks.pytorch.llama.torch_llama import TorchLlama
from benchmarks.pytorch.programs import torch_float8
from benchmarks.pytorch.torch_communication import AsyncTensorParallel
from benchmarks.pytorch.torch_programs import Place
from models.config import config_from_json

#: The kernels of attention, the preferred one first. CPUs have the last one.
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
#: What remat "dots" saves: products, and their sums over devices.
_DOTS = (torch.ops.aten.mm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default)
_RECOMPUTE = remat.CheckpointPolicy.PREFER_RECOMPUTE


class TorchTraining:
    """A random model, its optimizer and a batch; `step` is the trainer's configuration."""

    def __init__(
        self, step: Mapping, name: str, place: Place, dtype: torch.dtype, compiler: str | None
    ):
        self.settings, self.compute_loss = step["optimizer"], _loss
        self.losses: list[Tensor] = []
        self.fused = torch_float8.FusedOperators()
        torch.manual_seed(step["seed"])
        config = config_from_json(step["model"])
        with place.device:
            positions = torch.arange(step["sequence_length"])
            angles = torch.outer(positions, torch.tensor(step["frequencies"]))
            self.model = model = TorchLlama(config, angles, place, dtype)
            size = 2, step["batch_size"], len(positions)
            batch = torch.randint(config.vocabulary_size, size)
        self.chunk = step["loss_chunk"]
        is_sharded, is_narrow = name in TRAINING_NAMES[3], name.endswith("_bf16")
        self.autocast = not (is_sharded or is_narrow) and dtype != torch.float32
        model.to(dtype if is_narrow else torch.float32)
        for layer in _expert_layers(model):
            layer.keep_own()
        recipe = float8_recipe(name)
        if recipe is not None:
            # The head keeps its dtype, as in torchtitan and in our own recipes.
            torch_float8.convert(model.layers, recipe, emulate=place.device.type != "cuda")
        mesh = init_device_mesh(place.device.type, (place.devices,)) if place.devices > 1 else None
        if mesh and not is_sharded:
            _shard_tensors(model, mesh, torch_float8.styles(recipe))
        if mesh and name == "torch_context":
            self.divided = functools.partial(_divided, mesh, model)
            for block in model.layers:
                block.attention.repeats = config.num_heads // config.num_key_value_heads
        is_async = mesh is not None and "async" in name
        if is_async:
            AsyncTensorParallel(place.device)
        for number, block in enumerate(model.layers):
            model.layers[number] = block = _rematerialized(block, step["remat"])
            if compiler:
                _compile(block, compiler, self.fused.options(is_async))
        if mesh and is_sharded:
            _shard_weights(model, mesh, head_alone=not self.chunk)
            if name == "torch_fsdp":
                batch = batch.chunk(place.devices, dim=1)[place.rank]
            if compiler:
                self.compute_loss = torch.compile(_loss, backend=compiler)
        self.batches = batch.chunk(step["gradient_accumulation_steps"], dim=1)
        experts = _experts(model)
        self.parameters = [p for p in model.parameters() if p not in experts]
        self.place, self.experts = place, [*experts]
        groups = [{"params": [p for p in self.parameters if p.ndim > 1]}]
        groups += [{"params": [p for p in self.parameters if p.ndim == 1], "weight_decay": 0.0}]
        groups += [{"params": self.experts}] if self.experts else []
        betas, decay = (self.settings["b1"], self.settings["b2"]), self.settings["weight_decay"]
        self.optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=decay, fused=True)

    def step(self) -> None:
        """One optimizer step. The learning rate warms up and does not decay."""
        loss = self.backward()
        norm = self.gradient_norm()
        for parameters in filter(None, (self.parameters, self.experts)):
            nn.utils.clip_grads_with_norm_(parameters, self.settings["clip_norm"], norm)
        warm = min(1.0, len(self.losses) / max(self.settings["warmup_steps"], 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings["learning_rate"] * warm
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients, of all devices' experts too."""
        norm = _whole(nn.utils.get_total_norm([_gradient(p) for p in self.parameters]))
        if not self.experts:
            return norm
        square = nn.utils.get_total_norm([_gradient(p) for p in self.experts]).square()
        if self.place.devices > 1:
            dist.all_reduce(square)
        return (norm.square() + square).sqrt()

    def backward(self) -> Tensor:
        """Leaves the gradients in the parameters; returns the loss."""
        losses = []
        for batch in self.batches:
            with tp.loss_parallel(), self.divided(*batch) as (inputs, targets):
                with torch.autocast(inputs.device.type, self.model.dtype, enabled=self.autocast):
                    loss = self.loss(inputs, targets) / len(self.batches)
                loss.backward()
            losses.append(_whole(loss.detach()))
        return torch.stack(losses).sum()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.chunk:
            return self.model(inputs, targets, self.chunk)
        return self.compute_loss(self.model(inputs), targets)

    @staticmethod
    def divided(*batch: Tensor) -> AbstractContextManager[Sequence[Tensor]]:
        """In it, a sequence has the length that one device computes."""
        return contextlib.nullcontext(batch)


@contextlib.contextmanager
def _divided(mesh: DeviceMesh, model: TorchLlama, *batch: Tensor) -> Iterator[list[Tensor]]:
    """The parts [B, S / D] of a batch, while `context_parallel` attends to whole sequences."""
    parts = [tokens.clone() for tokens in batch]  # They shrink in place, and so do the waves.
    buffers, places = [*parts, *model.waves], [1] * len(parts) + [0] * len(model.waves)
    set_rotate_method("allgather")
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=places),
    ):
        yield parts


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets.flatten())


def _gradient(parameter: Any) -> Tensor:
    """The gradient, sharded as its parameter is. Fused AdamW would take a part of a sum for it."""
    if isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _experts(model: TorchLlama) -> dict[nn.Parameter, None]:
    """The parameters that other devices do not have, in order."""
    return dict.fromkeys(p for layer in _expert_layers(model) for p in layer.local_parameters())


def _expert_layers(model: TorchLlama) -> list[TorchExpertFeedForward]:
    return [m for m in model.modules() if isinstance(m, TorchExpertFeedForward)]


def _compile(block: Any, compiler: str, options: Any) -> None:
    """Compiles a block; one with experts in parts, since the host reads sizes in its middle."""
    compiled = functools.partial(torch.compile, backend=compiler, fullgraph=True)
    inner = getattr(block, "_checkpoint_wrapped_module", block)
    if inner.attention.repeats > 1:  # `context_parallel` is eager.
        for part in (inner.attention_norm, inner.feed_forward_norm, inner.feed_forward):
            part.compile(backend=compiler, fullgraph=True)
    elif isinstance(inner.feed_forward, TorchExpertFeedForward):
        inner.feed_forward.compile_parts(compiled)
        for part in (inner.attention_norm, inner.attention, inner.feed_forward_norm):
            part.compile(backend=compiler, fullgraph=True, options=options)
    else:
        block.compile(backend=compiler, fullgraph=True, options=options)


def _shard_tensors(model: TorchLlama, mesh: DeviceMesh, style: torch_float8.Styles) -> None:
    """Tensor and sequence parallelism; logits stay sharded."""
    columns, rows = style.column(), style.row(output_layouts=Shard(0))
    whole = style.module_input(input_layouts=Shard(0), desired_input_layouts=Replicate())
    norm, inner = tp.SequenceParallel(sequence_dim=0), ("query", "key", "value")
    plan = {"attention": whole, **{f"attention.{name}": columns for name in inner}}
    plan |= {"feed_forward": whole, "feed_forward.gate": columns, "feed_forward.up": columns}
    plan |= {"attention.output": rows, "feed_forward.down": rows}
    plan |= {"attention_norm": norm, "feed_forward_norm": norm}
    for block in model.layers:
        tp.parallelize_module(block, mesh, plan)
    head = tp.ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
    embedding = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    tp.parallelize_module(model, mesh, {"embedding": embedding, "norm": norm, "head": head})


def _shard_weights(model: TorchLlama, mesh: DeviceMesh, head_alone: bool) -> None:
    """FSDP2; masters and sums are float32."""
    policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
    experts = set(_experts(model)) or None
    last = [[model.norm, model.head]] if head_alone else []
    for part in (model.embedding, *model.layers, *last, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=experts)


def _rematerialized(block: nn.Module, kind: str) -> nn.Module:
    contexts = functools.partial(remat.create_selective_checkpoint_contexts, _policy)
    options = {"context_fn": contexts} if kind == "dots" else {}
    wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **options)
    return block if kind == "none" else wrapped


def _policy(_: Any, operator: Any, *_arguments: Any, **_options: Any) -> remat.CheckpointPolicy:
    return remat.CheckpointPolicy.MUST_SAVE if operator in _DOTS else _RECOMPUTE
