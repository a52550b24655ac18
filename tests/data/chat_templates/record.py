"""Records what Hugging Face's library makes of the templates in this folder.

Run from the repository's root with transformers installed::

    python tests/data/chat_templates/record.py

Each folder has the files of a tokenizer that concern templates, written for this test in the style
of published ones. Its expected.json has, of each conversation in conversations.json, the text
without and with a prompt for an answer, or null where the library raises an error.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
#: Any tokenizer; its tokens do not matter for texts.
TOKENIZER = HERE.parent / "hugging_face" / "llama3" / "tokenizer.json"


def rendered(tokenizer: Any, conversation: dict[str, Any], asks: bool) -> str | None:
    try:
        return tokenizer.apply_chat_template(
            conversation["messages"],
            tools=conversation.get("tools"),
            documents=conversation.get("documents"),
            add_generation_prompt=asks,
            tokenize=False,
            **conversation.get("variables", {}),
        )
    except Exception as error:
        print(f"  {conversation['name']}: {type(error).__name__}: {error}")
        return None


def record(folder: Path, conversations: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as copy:
        files = shutil.ignore_patterns("expected.json")
        shutil.copytree(folder, copy, ignore=files, dirs_exist_ok=True)
        if not (folder / TOKENIZER.name).exists():
            shutil.copy(TOKENIZER, copy)
        if (folder / "tokenizer_config.json").exists():
            tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
        else:
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(copy)
        texts = {
            each["name"]: [rendered(tokenizer, each, asks) for asks in (False, True)]
            for each in conversations
        }
    expected = {"transformers": transformers.__version__, "texts": texts}
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    conversations = json.loads((HERE / "conversations.json").read_text(encoding="utf-8"))
    for folder in sorted(path for path in HERE.iterdir() if path.is_dir()):
        if folder.name == "hostile":
            continue
        print(folder.name)
        record(folder, conversations)


if __name__ == "__main__":
    main()
