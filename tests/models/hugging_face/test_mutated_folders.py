"""Folders with anything wrong in them: a sentence, in time, and no file outside is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.hugging_face.tiny_folders import FIRST, FOLDERS, INDEX, SECOND, WEIGHTS
from tests.models.hugging_face.watched_folders import GENERATION, check, shards

CONFIGS = Path(__file__).parents[2] / "data" / "hugging_face_configs" / "configs"
OUTSIDE = "../outside/model.safetensors"
NAMES = st.sampled_from(
    [FIRST, SECOND, WEIGHTS, "config.json", INDEX, OUTSIDE, "/etc/passwd", "/dev/zero", "", ".",
     "..", "a/b.safetensors", "\0", "\ud800", "../model", f"./{FIRST}", f"x/../{FIRST}"]
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, 10**18, 10**400, 0.0, -0.0, 1.5, 1e-300, 1e39, 1e308]),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, NAMES, st.sampled_from(
        ["false", "silu", "llama", "llama3", "yarn", "full_attention", "sliding_attention"]
    )),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "x", "\ud800"]), inner, max_size=3),
    ),
    max_leaves=6,
)  # fmt: skip


@st.composite
def mutated_objects(draw: Any, name: str, value: Any) -> str:
    """The text of a JSON object of which keys, values or characters were changed."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(0, 3))):
        place = value
        while isinstance(place, dict) and place:
            key = draw(st.sampled_from([*sorted(place), "new"]))
            deeper = isinstance(place.get(key), dict) and draw(st.booleans())
            if deeper:
                place = place[key]
            elif draw(st.integers(0, 4)) == 0:
                place.pop(key, None)
                break
            else:
                place[key] = draw(VALUES)
                break
    text = json.dumps(value)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        start = draw(st.integers(0, len(text)))
        inserted = draw(
            st.sampled_from(['"', "{", "}", "[" * 3000, ",", "NaN", "\ufeff", "9" * 99])
        )
        text = text[:start] + inserted + text[start + draw(st.integers(0, 5)) :]
    return text


def _config_values() -> list[dict[str, Any]]:
    texts = (file.read_text() for file in sorted(CONFIGS.glob("[!t]*.json")))
    # The sizes of the tiny tensors, so that some mutated files are of a usable folder.
    tiny = {
        "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    }  # fmt: skip
    return [json.loads(text) | tiny for text in texts]


CONFIG_VALUES = _config_values()


@st.composite
def mutations(draw: Any) -> Callable[[Path], None]:
    """A tiny folder of any kind, of which files were changed."""
    base = draw(st.sampled_from([shards, *FOLDERS.values()]))
    config = draw(mutated_objects("config.json", draw(st.sampled_from(CONFIG_VALUES))))
    index = draw(mutated_objects(INDEX, {
        "metadata": {"total_size": 1}, "weight_map": draw(st.dictionaries(
            st.sampled_from(["model.norm.weight", "lm_head.weight", "x"]), NAMES, max_size=3
        ))
    }))  # fmt: skip
    generation = draw(mutated_objects(GENERATION, {"eos_token_id": [1, 2], "top_p": 0.9}))
    texts = {"config.json": config, INDEX: index, GENERATION: generation}
    written = draw(st.sets(st.sampled_from(sorted(texts)), max_size=3))
    damage = draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=3))
    replaced = draw(st.sampled_from([None, None, None, "FIFO", "folder", "link", "out", "circle"]))
    victim = draw(st.sampled_from(["config.json", INDEX, GENERATION, WEIGHTS, FIRST]))

    def write(folder: Path) -> None:
        base(folder)
        for name in written:
            data = texts[name].encode("utf-8", "surrogatepass")
            (folder / name).write_bytes(data)
        for file in sorted(folder.glob("*.safetensors"))[:1]:
            content = bytearray(file.read_bytes())
            for place, byte in damage:
                if place < len(content):
                    content[place] = byte
            file.write_bytes(content)
        path = folder / victim
        if replaced is not None:
            path.unlink(missing_ok=True)
        if replaced == "FIFO":
            os.mkfifo(path)
        elif replaced == "folder":
            path.mkdir()
        elif replaced is not None:
            target = {"link": FIRST, "out": OUTSIDE, "circle": victim}[replaced]
            path.symlink_to(folder / target)

    return write


@settings(max_examples=40)
@given(change=mutations())
def test_a_mutated_folder_is_usable_or_a_sentence(change):
    check(change)


@pytest.mark.exhaustive
@settings(max_examples=500)
@given(change=mutations())
def test_many_mutated_folders_are_usable_or_a_sentence(change):
    check(change)
