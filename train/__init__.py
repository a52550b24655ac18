"""The trainer: ``python -m train`` and ``python -m train.compare``."""
