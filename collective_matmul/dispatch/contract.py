"""The contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from collective_matmul.data import Record

Site = Any


@dataclass(frozen=True)
class Prediction:
    """A backend's prediction for a site.

    Attributes:
      seconds: time on one device, including the matmul of a weight gradient if the site has one.
      relative_error: the prediction is believed if its gain over the reference exceeds this
        fraction.
      basis: source of the prediction, in words.
    """

    seconds: float
    relative_error: float
    basis: str


class Configuration(Protocol):
    """A configuration of a backend for a site, such as the tiling of its kernel."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values, which identify it among those of the same site."""
        ...


class Backend(Protocol):
    """A way to execute the ops. Subclasses inherit the answers below that suit most backends.

    Attributes:
      name: name for the argument `implementation`.
      uses_peer_kernels: whether its kernels address the memory of peer GPUs, so that only programs
        may have them for which `overlap_jit` decides so, or is told to.
      predicts_precisely: whether its prediction may be compared with measurements of other
        backends. Else it counts only where no other backend was measured either.
    """

    name: str
    uses_peer_kernels: bool = False
    predicts_precisely: bool = True

    def unsupported_reason(self, site: Site) -> str | None:
        """Why it cannot execute a site, as part of a sentence; None if it can.

        While the site is being traced, call this inside its `jax.shard_map`.
        """
        ...

    def unprofitable_reason(self, site: Site) -> str | None:
        """Why it should not be chosen for a site that it can execute; None if nothing is wrong.

        The reason continues a sentence that begins with the backend's name, as "would hide
        nothing". Users are warned once where the backend would be the fastest otherwise.
        """
        del site

    def predict(self, site: Site) -> Prediction | None:
        """The predicted time of a site on the devices of the traced program; None if unknown.

        If it is the fastest at a site that it cannot execute, a warning says what is missed.
        """
        ...

    def configurations(self, site: Site) -> Sequence[Configuration]:
        """The configurations to tune a site over, the likeliest to be fastest first."""
        del site
        return ()

    def configured(self, configuration: Configuration) -> Self:
        """The same backend with one fixed configuration."""
        raise ValueError(f"{self.name} has no configurations, and {configuration} was given")

    def configuration_record(
        self, site: Site, configuration: Configuration, microseconds: float
    ) -> Record:
        """The record of a measured configuration, in the data that is called ``<name>_configs``."""
        return Record({"site": str(site)}, {self.name: microseconds}, configuration.to_json())
