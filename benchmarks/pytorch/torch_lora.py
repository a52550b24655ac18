"""``python -m benchmarks.pytorch.torch_lora``: PEFT's adapters on transformers' Llama.

One process per device, each with a copy of the frozen model and its part of the sequences; the
gradients of the adapters are averaged. Prints one line of JSON: the median time of a step, its
quartiles, tokens per second of all devices, and the peak memory of the first.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pytorch import MULTICAST_OFF

#: Vocabulary, width, hidden features, heads, heads of keys and values.
SIZES = {"llama3-8b": (128256, 4096, 14336, 32, 8), "tiny": (256, 64, 128, 4, 2)}


def make_model(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """A random frozen Llama in bfloat16, with adapters of the rank around all its matrices."""
    import peft
    import transformers

    vocabulary, width, hidden, heads, key_value_heads = SIZES[options.model]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=options.tokens,
        rope_theta=500000.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    adapters = peft.LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules="all-linear")
    model = peft.get_peft_model(model, adapters).to(device)
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if options.compile:
        for layer in model.base_model.model.model.layers:
            layer.compile()
    return model


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    """One device's process."""
    on_gpu = options.platform == "gpu"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, address, rank=rank, world_size=options.devices)
    torch.manual_seed(0)
    model = make_model(options, device)
    if options.devices > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    size = options.sequences // options.devices, options.tokens
    tokens = torch.randint(SIZES[options.model][0], size, device=device)

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    times = [step() for _ in range(options.warmup + options.steps)][options.warmup :]
    if rank == 0:
        median = statistics.median(times)
        described = {
            **vars(options),
            "seconds": median,
            "quartiles": statistics.quantiles(times, n=4),
            "tokens_per_second": options.sequences * options.tokens / median,
            "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        }
        print(json.dumps(described), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch.torch_lora")
    parser.add_argument("--model", choices=sorted(SIZES), default="llama3-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward")
    options = parser.parse_args()
    if options.sequences % options.devices:
        parser.error(f"--sequences {options.sequences}: --devices {options.devices} must divide it")
    os.environ.update(MULTICAST_OFF)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(work, (options, port), nprocs=options.devices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
