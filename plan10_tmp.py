"""Ten configurations: predictions (predict, on a CPU) and measurements (measure, on 2 GPUs)."""
import dataclasses, json, sys
from dataclasses import dataclass
from pathlib import Path
import jax
from benchmarks.step.train import TrainCase, Train, CANDIDATES, tables, comparing

@dataclass(frozen=True)
class Named(TrainCase):
    number: int = 0
    @property
    def name(self):
        return f"{self.number}. " + TrainCase.name.fget(self) + " " + self.trainer

def case(number, preset, layers, sequences, tokens, remat, zero, trainer):
    return Named(preset, layers, tokens, sequences, remat, zero, trainer, (), number)

CASES = [
    case(1, "llama3-8b", 8, 2, 8192, "none", 0, "--mesh.tensor 2"),
    case(2, "llama3-8b", 8, 2, 8192, "none", 3, "--mesh.fsdp 2"),
    case(3, "llama3-8b", 8, 2, 8192, "none", 2, "--mesh.fsdp 2"),
    case(4, "llama3-8b", 8, 2, 8192, "none", 3, "--mesh.context 2"),
    case(5, "llama3-8b", 8, 4, 4096, "dots", 3, "--mesh.fsdp 2 --fp8 rowwise"),
    case(6, "llama3-8b", 8, 1, 16384, "attention", 0, "--mesh.tensor 2 --fp8 tensorwise"),
    case(7, "llama3.2-1b", 16, 8, 4096, "none", 1, "--mesh.fsdp 2 --gradient-accumulation-steps 2 --scan-layers 1"),
    case(8, "llama3.2-3b", 28, 4, 2048, "full", 0, "--mesh.tensor 2 --scan-layers 1"),
    case(9, "qwen3-8b", 8, 1, 32768, "projections", 3, "--mesh.context 2"),
    case(10, "qwen3-8b", 8, 8, 2048, "full", 3, "--mesh.fsdp 2 --weight-gather blocks"),
]

def predict():
    from train.plan.run import predict_run
    from train.plan.memory_estimate import predict_memory
    from tests.train.compiled_memory import gpus, mesh_of
    from train.memory.step_memory import memory_of
    from train.optimizer.optimizer import make_optimizer
    from train.optimizer.state import state_on_mesh
    from train.parallel.model import ModelFunctions
    from unittest import mock
    from collective_matmul.ops.attention import flash_attention
    rows = []
    from jax.sharding import AbstractMesh
    for c in CASES:
        config = dataclasses.replace(c.config())
        sizes = c.mesh_sizes(2)
        p = predict_run(config, sizes, "NVIDIA H100 80GB HBM3", "flash3")
        e = predict_memory(config, sizes)
        rows.append(dict(number=c.number, name=c.name, ms=1e3 * p.time.total, plan_gb=e.total / 1e9))
    with gpus(2) as devices:
        for c, row in zip(CASES, rows):
            config, sizes = c.config(), c.mesh_sizes(2)
            mesh = mesh_of(devices, sizes)
            model = ModelFunctions(config, sizes)
            optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
            row["dry_gb"] = memory_of(config, mesh.abstract_mesh, model, state_on_mesh(model, optimizer, mesh)).total / 1e9
            print(row, flush=True)
    Path(sys.argv[2]).write_text(json.dumps(rows, indent=1))

def measure():
    settings = Train(candidates=("auto",), try_options=False, compile_cases=5, groups=5, group_seconds=2.0, output=Path(sys.argv[2]), devices=2, limit_seconds=float(sys.argv[3]))
    numbers = [int(n) for n in sys.argv[4].split(",")] if len(sys.argv) > 4 else range(1, 11)
    report = comparing.run("train", settings, [c for c in CASES if c.number in numbers], CANDIDATES)
    for c in report.content["cases"]:
        r = c["candidates"]["auto"]
        if "median" not in r:
            print(c["name"], "FAILED", str(r.get("failure"))[:300]); continue
        print(f"{c['name']} | ms {1e3*r['median']:.1f} {1e3*r['low']:.1f} {1e3*r['high']:.1f} | GB {r['peak_bytes']/1e9:.2f} | losses {r['losses'][:1]} {r['losses'][-1:]} | {set(d.split(':')[0] for d in r['decisions'])}")

if __name__ == "__main__":
    {"predict": predict, "measure": measure}[sys.argv[1]]()
