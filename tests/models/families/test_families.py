"""Each family's model equals an independent one, and its config.json is read and written."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from models.config import LlamaConfig, RotaryScaling
from models.families import FAMILIES, PRESETS, read_config, write_config
from tests.models import reference
from tests.models.test_llama import (
    SMALL,
    TOLERANCE,
    random_params,
    random_tokens,
    sharded_loss_and_grads,
)
from train.config.config import Config, MeshSizes
from train.parallel.model import ModelFunctions

#: Peculiarities of families, and of models that the tensor axis does not divide.
MODELS = {
    "biases": dataclasses.replace(SMALL, family="qwen2", projection_bias=True),
    "norms of heads": dataclasses.replace(SMALL, family="qwen3", query_key_norm=True, head_dim=6),
    "window": dataclasses.replace(SMALL, family="mistral", sliding_window=3),
    # One wave is kept, two are on the ramp, and one is slowed down by the whole factor.
    "yarn": dataclasses.replace(
        SMALL,
        head_dim=8,
        rotary_base=100.0,
        rotary_scaling=RotaryScaling(
            kind="yarn", factor=4.0, original_context=64, beta_fast=8.0, beta_slow=1.0
        ),
    ),
    "few heads of keys": dataclasses.replace(SMALL, num_key_value_heads=2, projection_bias=True),
    "experts": dataclasses.replace(
        SMALL, family="mixtral", num_experts=8, num_experts_per_token=3, hidden_features=12
    ),
    "sinks": dataclasses.replace(
        SMALL, attention_sinks=True, output_bias=True, sliding_window=3, full_attention_period=2
    ),
    "gpt-oss": dataclasses.replace(
        SMALL,
        family="gpt_oss",
        projection_bias=True,
        output_bias=True,
        attention_sinks=True,
        sliding_window=3,
        full_attention_period=2,
        num_experts=8,
        num_experts_per_token=3,
        hidden_features=12,
        expert_bias=True,
        expert_activation="gpt_oss",
    ),
    "padded": dataclasses.replace(SMALL, vocabulary_size=23).padded_for(4),
    "padded and tied": dataclasses.replace(SMALL, vocabulary_size=23, tied_head=True).padded_for(4),
}


def functions_of(model: LlamaConfig, **changes) -> ModelFunctions:
    config = Config(model=model, compute_dtype="float32", **changes)
    return ModelFunctions(config, MeshSizes(1, 1, 4))


@cache
def expected_of(name: str):
    import jax
    import jax.numpy as jnp

    model = MODELS[name]

    def loss(params):
        return jnp.mean(reference.loss(model, params, *batch()))

    return jax.jit(jax.value_and_grad(loss))(random_params(functions_of(model)))


def batch() -> tuple[np.ndarray, ...]:
    return tuple(np.minimum(tokens, 22) for tokens in random_tokens())


# Each model by default with one of them. `few heads of keys` has biases too.
REWRITTEN = ("biases", "padded and tied")
# `gpt-oss` has sinks and windows, `padded and tied` a padded vocabulary; rotary positions have no
# weights.
PARTS_OF_OTHERS = ("padded", "sinks", "window", "yarn")


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        pytest.param(
            name,
            overlap,
            marks=()
            if (overlap == "rewrite") == (name in REWRITTEN) and name not in PARTS_OF_OTHERS
            else pytest.mark.exhaustive,
        )
        for name in MODELS
        for overlap in ("ring", "rewrite")
    ],
)
def test_loss_and_gradients_equal_those_of_the_unsharded_model(make_mesh, name, overlap):
    functions = functions_of(MODELS[name], overlap=overlap)
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 4})
    loss, grads = sharded_loss_and_grads(functions, mesh)(random_params(functions), *batch())
    expected, expected_grads = expected_of(name)
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[path], **TOLERANCE, err_msg=path)


@pytest.mark.parametrize("name", ["biases", "norms of heads", "window", "yarn"])
def test_a_peculiarity_changes_the_result(name):
    plain = dataclasses.replace(
        MODELS[name],
        projection_bias=False,
        query_key_norm=False,
        sliding_window=None,
        rotary_scaling=RotaryScaling(),
    )
    params = random_params(functions_of(MODELS[name]))
    losses = [reference.loss(model, params, *batch()) for model in (plain, MODELS[name])]
    assert np.max(np.abs(losses[0] - losses[1])) > 1e-2


@pytest.mark.parametrize("preset", PRESETS)
def test_config_json_says_the_whole_configuration(preset):
    model = PRESETS[preset]()
    values = write_config(model)
    assert read_config(values) == model
    assert values["architectures"] == [FAMILIES[model.family].architecture]


def test_a_padded_model_is_written_without_padding():
    assert read_config(write_config(MODELS["padded"])).vocabulary_size == 23


def published(**changes):
    """A config.json as Hugging Face's library writes it since version 5."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "dtype": "bfloat16",
        "eos_token_id": [128001, 128008],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
        "transformers_version": "5.0.0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    return {**values, **changes}


def test_rotary_parameters_are_read_in_old_and_new_form():
    expected = dataclasses.replace(PRESETS["llama3.2-1b"](), context_length=131072)
    new = published()
    assert read_config(new) == expected
    parameters = dict(new.pop("rope_parameters"))
    old = {**new, "rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    assert read_config(old) == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3' is not known; expected one of Llama"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures='LlamaForSequenceClassification' with model_type='llama' is not",
        ),
        # What names one architecture and not its type is told the type.
        ({"model_type": None}, "model_type=None: expected 'llama' with architectures='LlamaForCau"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "model_type='llama': expected 'qwen3' with arch"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; expected 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported; expected False"),
        ({"hidden_size": None}, "hidden_size=None: expected an integer from 1"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 is not known and may change what the model"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not known"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            "rope_parameters of type 'longrope' is not supported; expected 'llama3' or 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "attention_factor": 2.0}},
            "attention_factor=2.0 is not known",
        ),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_config(published(**change))


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({}, None),
        ({"use_sliding_window": True, "max_window_layers": 0}, 128),
        ({"use_sliding_window": True, "max_window_layers": 16}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 16}, 128),
        ({"use_sliding_window": True, "max_window_layers": 8}, "layers differ"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 8}, "layers differ"),
    ],
    ids=str,
)
def test_a_sliding_window_of_qwen_is_that_of_all_layers(keys, window):
    values = published(
        model_type="qwen2", architectures=["Qwen2ForCausalLM"], sliding_window=128, **keys
    )
    del values["attention_bias"], values["mlp_bias"]
    if isinstance(window, str):
        with pytest.raises(ValueError, match=window):
            read_config(values)
    else:
        assert read_config(values).sliding_window == window


def test_a_model_that_its_family_has_not_is_not_written():
    with pytest.raises(ValueError, match="projection_bias=True: models of the family 'llama' have"):
        write_config(dataclasses.replace(SMALL, projection_bias=True))
    with pytest.raises(ValueError, match="num_experts=8: models of the family 'llama' have None"):
        write_config(dataclasses.replace(MODELS["experts"], family="llama"))


def test_a_model_that_the_library_would_refuse_is_not_written():
    model = dataclasses.replace(SMALL, features=33, head_dim=8)
    sentence = "models of the family 'llama' with these sizes are refused .*hidden_size=33 is not a"
    with pytest.raises(ValueError, match=sentence):
        write_config(model)
