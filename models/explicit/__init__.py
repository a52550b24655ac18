"""The model over global arrays, on a mesh whose axes are of type Explicit."""

from models.explicit.model import GatheredWeight, count_sites, loss, whole

__all__ = ["GatheredWeight", "count_sites", "loss", "whole"]
