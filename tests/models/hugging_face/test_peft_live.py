"""PEFT and transformers load the adapters and merged models that are written here."""

from __future__ import annotations

import numpy as np
import pytest

from models.hugging_face import MergedParams, ModelFolder, write, write_adapter
from tests.models.hugging_face.folders import DATA
from tests.models.hugging_face.test_adapter_folder import FAMILIES, adapter, expected_of
from tests.models.hugging_face.test_reading import loaded

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# PEFT asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")


def model_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def assert_logits(model, name):
    expected = expected_of(name)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]).long()).logits.numpy()
    # Both are float32.
    assert np.max(np.abs(logits - expected["logits"])) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_our_adapter(tmp_path, name):
    given = adapter(name)
    write_adapter(tmp_path / "out", ModelFolder(DATA / name).config, given.config, given.params)
    assert_logits(peft.PeftModel.from_pretrained(model_of(DATA / name), tmp_path / "out"), name)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_our_merged_model(tmp_path, name):
    _, params = loaded(name, 2)
    merged = MergedParams(params, adapter(name))
    write(tmp_path / "out", ModelFolder(DATA / name).config, merged, dtype="float32")
    assert_logits(model_of(tmp_path / "out"), name)
