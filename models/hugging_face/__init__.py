"""Folders of Hugging Face's library: models read from them and written as them."""

from models.hugging_face.adapter_folder import (
    AdapterFolder,
    MergedParams,
    export_adapter,
    write_adapter,
)
from models.hugging_face.folder import ModelFolder
from models.hugging_face.peft_config import PeftConfig
from models.hugging_face.reading import load
from models.hugging_face.writing import write

__all__ = [
    "AdapterFolder",
    "MergedParams",
    "ModelFolder",
    "PeftConfig",
    "export_adapter",
    "load",
    "write",
    "write_adapter",
]
