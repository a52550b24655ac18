"""Fine-tunes a Hugging Face model with low-rank adapters, exports them and answers with them.

The first argument is the folder of the model. Without one, a tiny model of the tests is taken.
Each call is a command: `train(["--steps", "8"])` is `python -m train --steps 8`.
"""

import json
import sys
import tempfile
from pathlib import Path

from models.command_line import main as models
from models.generation import Generator
from models.hugging_face import AdapterFolder, MergedParams, ModelFolder, load, write
from train.run.command_line import main as train

TINY = Path(__file__).parents[2] / "tests/data/hugging_face/llama3"
#: Without GPUs, all commands of one process simulate as many devices as the trainer does.
SIMULATED = ["--devices.cpu-devices", "8"]


# [data]
def write_data(path: Path) -> None:
    """JSON lines, each with a document under the key "text"."""
    rivers = ["the Rhine", "the Danube", "the Elbe", "the Oder"]
    lines = [json.dumps({"text": f"Name a river. {river}."}) for river in rivers * 16]
    path.write_text("\n".join(lines), encoding="utf-8")


# [train]
def fine_tune(folder: str, data: str, run: str) -> None:
    source = ["--init-from", folder, "--data", data, "--checkpoint-dir", run]
    adapters = ["--lora.rank", "8", "--lora.alpha", "16"]
    settings = ["--batch-size", "4", "--sequence-length", "64", "--steps", "8"]
    settings += ["--optimizer.learning-rate", "1e-2", "--optimizer.warmup-steps", "1"]
    train([*source, *adapters, *settings, "--mesh.tensor", "2", "--log-interval", "4"])


# [export]
def export(folder: str, run: str, adapter: str, merged: str) -> None:
    models(["export", run, adapter, *SIMULATED])  # as PEFT saves adapters
    source = ModelFolder(folder)
    generator = Generator(source.config, dtype="float32")
    params = load(source, generator.abstract_params)
    params = MergedParams(params, AdapterFolder(adapter, source.config))
    write(merged, generator.config, params, origin=source.path)  # as Hugging Face saves models


# [run]
if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else str(TINY)
    with tempfile.TemporaryDirectory() as work:
        data, run, adapter, merged = (f"{work}/{n}" for n in ("data.jsonl", "run", "lora", "model"))
        write_data(Path(data))
        fine_tune(folder, data, run)
        export(folder, run, adapter, merged)
        question = ["--prompt", "Name a river.", "--max-new-tokens", "8", *SIMULATED]
        models(["generate", merged, *question])
