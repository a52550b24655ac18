"""The tiny models of tests/data/hugging_face, which make.py there made."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[2] / "data" / "hugging_face"
NAMES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
