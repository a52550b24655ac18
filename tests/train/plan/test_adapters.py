"""Plans and predictions of runs that train adapters, or a part of the weights."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from models.parameters.adapters import LoraConfig
from tests.train.plan.plans import EIGHT, H100, TENSOR, config, plan_of
from train.config.config import MeshSizes
from train.log.metrics import peak_flops
from train.memory.device_memory import GPUS
from train.memory.step_memory import memory_of
from train.parallel.mesh import make_abstract_mesh
from train.parallel.model import ModelFunctions
from train.plan.candidates import check_sharded
from train.plan.memory_estimate import predict_memory
from train.plan.step_time import predict
from train.plan.traced_rows import TOO_HIGH_IF_UNSURE
from train.run.command_line import main, parse

# The report lora-2-h100: preset, mesh, remat, backend, format of frozen weights, ms, GiB.
WITH_ADAPTERS = {
    "70B": ("llama3-70b", TENSOR, "full", "auto", "rowwise", 2087.0, 43.7),
    "70B xla": ("llama3-70b", TENSOR, "full", "xla", "rowwise", 2244.6, 43.2),
    "70B projections": ("llama3-70b", TENSOR, "projections", "auto", "rowwise", 1984.8, 59.7),
    "70B attention": ("llama3-70b", TENSOR, "attention", "auto", "rowwise", 2078.1, 48.2),
    "8B": ("llama3-8b", TENSOR, "none", "auto", None, 344.5, 34.4),
    "8B xla": ("llama3-8b", TENSOR, "none", "xla", None, 381.6, 34.5),
    "8B data": ("llama3-8b", MeshSizes(data=2), "none", "auto", None, 347.3, 48.5),
    "8B rowwise": ("llama3-8b", TENSOR, "none", "auto", "rowwise", 281.6, 27.9),
}


@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_predictions_with_adapters_are_near_what_was_measured(name: str) -> None:
    preset, sizes, remat, overlap, stored, milliseconds, gib = WITH_ADAPTERS[name]
    shape: dict[str, Any] = {"batch_size": 2, "sequence_length": 4096, "scan_layers": 1}
    lora = LoraConfig(rank=16, base_format=stored)
    run = config(preset, lora=lora, remat=remat, overlap=overlap, **shape)
    predicted = predict(run, sizes, H100, attention="flash3")
    assert 1e3 * predicted.time.total == pytest.approx(milliseconds, rel=0.065)
    assert 0.96 <= predict_memory(run, sizes).total / 2**30 / gib <= 1.01


ADAPTERS, IN_8_BITS = LoraConfig(rank=16), LoraConfig(rank=16, base_format="rowwise")


# Sequences, mesh, settings, the most by which the plan may be too high.
FROZEN: dict[str, tuple[int, MeshSizes, dict[str, Any], float]] = {
    "adapters": (2, TENSOR, {"lora": ADAPTERS}, 1.05),
    "scan": (2, TENSOR, {"lora": ADAPTERS, "scan_layers": 1}, 1.05),
    "8 bits": (2, TENSOR, {"lora": IN_8_BITS, "remat": "dots"}, 1.05),
    "ZeRO 1": (4, MeshSizes(fsdp=4), {"lora": ADAPTERS, "zero": 1}, 1.05),
    # The table of the head is gathered beside the logits in the plan, and before in the dry run.
    "ZeRO 3": (4, MeshSizes(fsdp=4), {"lora": ADAPTERS, "zero": 3}, 1.30),
    # A loop over microbatches has copies of the shards.
    "ZeRO 3, microbatches": (
        8,
        MeshSizes(fsdp=2, tensor=2),
        {"lora": ADAPTERS, "zero": 3, "remat": "dots", "gradient_accumulation_steps": 2},
        1.05,
    ),
    "ZeRO 3, 8 bits": (4, MeshSizes(fsdp=2, tensor=2), {"lora": IN_8_BITS, "zero": 3}, 1.05),
    "two layers": (2, TENSOR, {"lora": LoraConfig(rank=16, targets="q_proj,v_proj")}, 1.15),
    "frozen by name": (2, TENSOR, {"freeze": "embedding,layers.attention.*"}, 1.05),
}


@pytest.mark.parametrize("name", FROZEN)
def test_memory_beside_frozen_weights_is_near_what_a_dry_run_traces(name: str) -> None:
    sequences, sizes, changes, most = FROZEN[name]
    run = config(layers=3, batch_size=sequences, sequence_length=4096, **changes)
    check_sharded(run, sizes)
    traced = memory_of(run, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    estimate = predict_memory(run, sizes)
    assert estimate.state == pytest.approx(traced.state, rel=0.002)
    assert 0.95 <= estimate.total / traced.total <= most <= 1 + TOO_HIGH_IF_UNSURE


@pytest.mark.parametrize("changes", [{"lora": ADAPTERS}, {"freeze": "layers.attention.*"}])
def test_mfu_counts_the_flops_of_what_is_trained(changes: dict[str, Any]) -> None:
    run = config(layers=2, batch_size=1, sequence_length=4096, **changes)
    predicted = predict(run, MeshSizes(), H100)
    flops = ModelFunctions(run).flops_per_token(4096)
    peak = peak_flops(H100)
    assert peak is not None
    assert predicted.mfu == pytest.approx(flops * predicted.tokens_per_second / peak, rel=1e-3)


def test_adapters_are_planned(capsys) -> None:
    """And what does not fit otherwise is advised with flags that a plan takes."""
    large = shlex.split("--plan --preset llama3-70b --device H100 --devices 2 --batch-size 2")
    large += ["--scan-layers", "1"]  # It takes less time to trace.
    advised = ["--lora.rank 16", "--lora.base-format rowwise"]
    for advice in advised:
        with pytest.raises(SystemExit, match=r"^1$"):
            main(large)
        assert advice in capsys.readouterr().out.splitlines()[-1]
        large += advice.split()
    main(large)
    output = capsys.readouterr().out
    [command] = re.findall("^to run the first: python -m train (.*)$", output, re.MULTILINE)
    assert parse(shlex.split(command)).lora == IN_8_BITS
    assert "rows in 8 bits (--lora.base-format) round" in output
    assert "MFU does not count gradients for frozen weights" in output
    # What a run would refuse.
    with pytest.raises(SystemExit):
        main([*large, "--lora.train", "layers.feed_forward.up.kernel"])
    assert "one gather for all its layers; train all of its" in " ".join(
        capsys.readouterr().err.split()
    )


def test_adapters_have_rows_in_8_bits_and_a_mesh_that_gathers_what_is_frozen(capsys) -> None:
    main(["--plan", *EIGHT, "--lora.rank", "16", "--batch-size", "8"])
    output = capsys.readouterr().out
    commands = dict(re.findall("^to (.*?): python -m train (.*)$", output, re.MULTILINE))
    in_8_bits = parse(shlex.split(commands["run the first in 8 bits"]))
    assert (in_8_bits.fp8, in_8_bits.lora.base_format) == (None, "rowwise")
    plan = plan_of("llama3-8b", 8, layers=4, lora=ADAPTERS, zero=3, sequence_length=32_768)
    assert plan.candidates
    for candidate in plan.candidates:  # Matmuls gather over one axis.
        assert candidate.sizes.context == 1
    assert "zero" in plan.refused
