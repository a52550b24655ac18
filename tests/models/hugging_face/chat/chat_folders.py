"""The chat templates of tests/data/chat_templates, and folders made of some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from models.hugging_face.chat import template_process

DATA = Path(__file__).parents[3] / "data" / "chat_templates"
NAMES = sorted(file.parent.name for file in DATA.glob("*/expected.json"))
HOSTILE = {file.stem: file.read_text(encoding="utf-8") for file in DATA.glob("hostile/*.jinja")}
CONVERSATIONS: list[dict[str, Any]] = json.loads(
    (DATA / "conversations.json").read_text(encoding="utf-8")
)
QUESTION = [{"role": "user", "content": "Hi"}]


def with_template(folder: Path, template: str, **settings: Any) -> Path:
    """Makes a folder with a template, and a tokenizer_config.json with these settings."""
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextmanager
def low_limits() -> Iterator[None]:
    """Limits that hostile templates reach soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "LIMIT_SECONDS", 0.2)
        patch.setattr(template_process, "LIMIT_MEMORY_BYTES", 2**29)
        yield
