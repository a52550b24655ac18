"""The schema of config.json, key by key, beside Hugging Face's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.families import FAMILIES, read_config
from models.families.config_keys import WITHOUT_INFLUENCE, Key
from models.families.rotary_keys import write_rotary

TABLE = json.loads(
    (Path(__file__).parents[2] / "data" / "hugging_face_configs" / "defaults.json").read_text()
)
SAMPLES = TABLE["about"]["samples"]
#: Keys that are no fields of all classes: their model reads them elsewhere, or ignores them.
OURS = {
    "attention_bias", "head_dim", "max_window_layers", "mlp_bias", "model_type",
    "num_local_experts", "partial_rotary_factor", "pretraining_tp", "rope_interleaved",
    "rope_scaling", "rope_theta", "torch_dtype", "use_mrope", "experts_per_token",
    "initial_context_length", "quantization_config",
}  # fmt: skip


def keys_of(family: str) -> dict[str, Key]:
    return {key.name: key for key in FAMILIES[family].keys}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_the_class_is_known(family):
    theirs = TABLE[family]["defaults"]
    assert not theirs.keys() - keys_of(family).keys() - WITHOUT_INFLUENCE
    assert not keys_of(family).keys() - theirs.keys() - OURS


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_defaults_of_the_class(family):
    theirs = TABLE[family]["defaults"]
    ours = {name: key.default for name, key in keys_of(family).items() if name in theirs}
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_without_keys_is_the_model_of_the_class(family):
    theirs = TABLE[family]["without_keys"]
    ours = read_config({"model_type": family})
    assert ours.vocabulary_size == theirs["vocab_size"]
    assert ours.num_layers == theirs["num_hidden_layers"]
    assert ours.features == theirs["hidden_size"]
    hidden = theirs.get("moe_intermediate_size", theirs["intermediate_size"])
    assert ours.hidden_features == hidden
    defaults = TABLE[family]["defaults"]
    experts = defaults.get("num_experts", defaults.get("num_local_experts"))
    assert ours.num_experts == experts
    assert ours.num_experts_per_token == theirs.get("num_experts_per_tok")
    assert ours.normalize_expert_weights == theirs.get("norm_topk_prob", True)
    assert ours.router_loss_weight == theirs.get("router_aux_loss_coef", 0)
    assert ours.num_heads == theirs["num_attention_heads"]
    assert ours.num_key_value_heads == theirs["num_key_value_heads"]
    assert ours.head_dim == (theirs.get("head_dim") or ours.features // ours.num_heads)
    assert ours.norm_epsilon == theirs["rms_norm_eps"]
    assert ours.tied_head == theirs["tie_word_embeddings"]
    assert ours.sliding_window == theirs.get("sliding_window")
    written = write_rotary(ours.rotary_base, ours.rotary_scaling)
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    assert theirs["rope_parameters"] == {"rope_theta": ours.rotary_base, **scaling}
    # How long prompts may be is left open. Their class has a number, which its model does not use.
    assert ours.context_length is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_the_class_refuses_is_refused(family):
    """So a wrong type never becomes another model than theirs."""
    for name, key in keys_of(family).items():
        taken = TABLE[family]["taken"].get(name, range(len(SAMPLES)))
        wrong = [value for number, value in enumerate(SAMPLES) if number not in taken]
        assert not [value for value in wrong if key.kind.contains(value)], name


def wrong(kind: str) -> list[Any]:
    return {
        "size": [0, -1, 1.5, 8.0, "8", True, [8], {}, None, 10**18, float("nan")],
        "flag": ["false", "true", 0, 1, None, [], {}],
        "epsilon": [0, 1e-300, -1e-6, float("inf"), float("nan"), "1e-6", None, 10**400, True],
        "tokens": ["2", 2.0, True, [[2]], ["2"], {}, 2**63, [None]],
    }[kind]


KINDS = {
    "vocab_size": "size",
    "hidden_size": "size",
    "intermediate_size": "size",
    "num_hidden_layers": "size",
    "num_attention_heads": "size",
    "max_position_embeddings": "size",
    "tie_word_embeddings": "flag",
    "use_cache": "flag",
    "mlp_bias": "flag",
    "attention_bias": "flag",
    "rms_norm_eps": "epsilon",
    "rope_theta": "epsilon",
    "eos_token_id": "tokens",
    "bos_token_id": "tokens",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KINDS)
def test_a_value_of_the_wrong_type_or_range_is_a_sentence(family, name):
    for value in wrong(KINDS[name]):
        with pytest.raises(ValueError, match=rf"^config.json: {name}=.*: expected "):
            read_config({"model_type": family, name: value})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(({"factor": value}, "factor=") for value in (0, 0.5, -8, "8", None, True, float("nan"))),
        *(({"low_freq_factor": value}, "low_freq_factor=") for value in (0, -1, "1", None, 4.0, 5)),
        ({"high_freq_factor": float("inf")}, "high_freq_factor=inf"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({"original_max_position_embeddings": 64.0}, "original_max_position_embeddings=64.0"),
        ({"rope_theta": "10000"}, "rope_theta='10000'"),
        ({"rope_type": None}, "of type None is not supported"),
        ({"rope_type": ["llama3"]}, "is not supported"),
        ({"rope_type": "linear"}, "of type 'linear' is not supported"),
        ({"type": 3}, "type=3: expected a string"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"mscale": 1.0}, "mscale=1.0 is not known"),
    ],
    ids=str,
)
def test_a_wrong_rotary_scaling_is_a_sentence(place, change, sentence):
    with pytest.raises(ValueError, match=f"^config.json: {place}.*{sentence}"):
        read_config({"model_type": "llama", place: LLAMA3 | change})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(({"factor": value}, "factor=") for value in (0, 0.5, -8, "8", True, float("nan"))),
        ({"factor": None, "original_max_position_embeddings": 4096}, "less than 1"),
        *(({"beta_fast": value}, "beta_fast=") for value in (0, -1, "1", True, float("inf"))),
        ({"beta_slow": 0}, "beta_slow=0: expected"),
        ({"beta_slow": 32}, "beta_slow=32 and beta_fast=32: expected the second to be larger"),
        ({"beta_fast": 0.5}, "beta_slow=1 and beta_fast=0.5: expected the second to be larger"),
        ({"attention_factor": 0}, "attention_factor=0: expected"),
        ({"mscale": -1}, "mscale=-1: expected"),
        ({"truncate": None}, "truncate=None: expected true or false"),
        ({"original_max_position_embeddings": 64.0}, "original_max_position_embeddings=64.0"),
        ({"rope_theta": 1}, "rope_theta=1: expected more"),
        ({"low_freq_factor": 1.0}, "low_freq_factor=1.0 is not known"),
    ],
    ids=str,
)
def test_a_wrong_scaling_by_yarn_is_a_sentence(change, sentence):
    for place in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=f"^config.json: {place}.*{sentence}"):
            read_config({"model_type": "llama", place: YARN | change})


def test_a_scaling_by_yarn_without_a_factor_is_incomplete():
    scaling = {name: value for name, value in YARN.items() if name != "factor"}
    with pytest.raises(ValueError, match="rope_scaling has no 'factor'"):
        read_config({"model_type": "llama", "rope_scaling": scaling})


@pytest.mark.parametrize("value", [[], "llama3", 3, True])
def test_a_rotary_scaling_that_is_no_object_is_a_sentence(value):
    for place in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=f"{place}=.*: expected an object, or null"):
            read_config({"model_type": "llama", place: value})


@pytest.mark.parametrize(
    ("keys", "base", "factor", "original"),
    [
        ({"rope_scaling": LLAMA3, "rope_theta": 5e5}, 5e5, 8, 64),
        # The old name takes the place of the new one, base included.
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 7.0}}, 1e4, 8, 64),
        ({"rope_scaling": {}, "rope_parameters": {**LLAMA3, "rope_theta": 7.0}}, 7, 8, 64),
        ({"rope_scaling": None, "rope_parameters": None, "rope_theta": 9}, 9, 1, 8192),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, 7, 1, 8192),
        ({"rope_parameters": {"type": "default", "rope_type": "default"}}, 1e4, 1, 8192),
        ({"rope_scaling": {**LLAMA3, "type": "linear"}}, 1e4, 8, 64),
        ({"rope_scaling": {**LLAMA3, "factor": 1}}, 1e4, 1, 8192),
    ],
    ids=str,
)
def test_rotary_keys_of_old_and_new_files_have_the_precedence_of_the_library(
    keys, base, factor, original
):
    model = read_config({"model_type": "llama", **keys})
    scaling = model.rotary_scaling
    assert (model.rotary_base, scaling.factor, scaling.original_context) == (base, factor, original)


def test_the_original_context_is_by_default_the_longest():
    scaling = {name: LLAMA3[name] for name in LLAMA3 if not name.startswith("original")}
    keys = {"model_type": "llama", "rope_scaling": scaling}
    assert read_config(keys).rotary_scaling.original_context == 2048
    model = read_config(keys | {"max_position_embeddings": 128})
    assert model.rotary_scaling.original_context == 128


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 4097}, "hidden_size=4097 is not a multiple of num_attention_heads=32"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 is not a multiple of num_key_value"),
        ({"head_dim": 63}, "heads of 63 features"),
        ({"num_attention_heads": 4096}, "heads of 1 features"),
        ({"model_type": "mistral", "num_attention_heads": 2052}, "num_attention_heads=2052 is not"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads=None: exp"),
        ({"model_type": "mistral", "num_attention_heads": 8192}, "heads of 0 features"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0: expected"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim=None: expected"),
        ({"model_type": "qwen2", "layer_types": []}, "layer_types has 0 entries for num_hidden"),
        ({"model_type": "qwen2", "layer_types": "full_attention"}, "layer_types='full_attention'"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32},
            "layer_types asks for sliding_attention, and use_sliding_window=False",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts=0: expected an int"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 129}, "is more than the number of exp"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 9}, "two names of one"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, "some layers have experts and other"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers=3: expected a list"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": 1}, "norm_topk_prob=1: expected true or f"),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 2},
            "max_window_layers=2 with use_sliding_window=True",
        ),
        # The window that the key leaves out has 4096 tokens, in the last 4 of 32 layers.
        ({"model_type": "qwen2", "use_sliding_window": True}, "layers differ"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not known"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        ({"architectures": [3]}, "architectures=3"),
        ({"dtype": 3}, "dtype=3: expected a string, or null"),
        ({"\ud800": 3}, r"config.json: '\\ud800'=3 is not known"),
        ({"x" * 10**6: [[[[[1]]]]]}, r"is not known"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_that_do_not_go_together_are_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        read_config({"model_type": "llama", **change})
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 28}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None}, None),
        ({"model_type": "qwen3", "layer_types": ["attention"] * 32}, None),
    ],
    ids=str,
)
def test_a_window_is_that_of_the_class(keys, window):
    assert read_config(keys).sliding_window == window
