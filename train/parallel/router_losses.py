"""The losses of routers, of the whole batch of a step, and what is logged of them.

The loss that balances experts is a product of two means over tokens. Both are of all devices and
all microbatches: a device adds its share of the loss, and the gradients of all shares sum up to
that of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.layers import (
    RouterStatistics,
    largest_over_mean,
    load_balancing_loss,
    router_z_loss,
)
from train.config.config import Config
from train.config.experts import balance_weight
from train.parallel.mesh import all_axes


class RouterLosses(NamedTuple):
    """The weights of the losses in that of a step.

    Attributes:
      balance: of the loss that balances experts.
      z: of the loss that keeps logits small.
    """

    balance: float
    z: float

    @classmethod
    def of(cls, config: Config) -> RouterLosses:
        """The weights of a configuration."""
        return cls(balance_weight(config), config.router_z_loss_weight)

    def share(self, own: RouterStatistics, whole: RouterStatistics) -> jax.Array:
        """The share of a tensor group's tokens in the weighted losses, float32 [].

        Args:
          own: statistics [layers, *] of this device's tokens of a microbatch, with gradients.
          whole: those of all tokens of the step.
        """
        own, whole = own.sum_over_layers(), whole.sum_over_layers()
        total = jnp.zeros((), jnp.float32)
        if self.balance:
            total += self.balance * load_balancing_loss(own, whole)
        if self.z:
            total += self.z * router_z_loss(own, whole)
        # As the cross-entropy, the same on all devices of a tensor group.
        return lax.psum(total, "tensor") if self.balance or self.z else total


def of_all_devices(own: RouterStatistics) -> RouterStatistics:
    """The statistics of the tokens of all devices, without gradients."""
    return jax.tree.map(lax.stop_gradient, own).sum_over_devices(all_axes())


def router_metrics(own: RouterStatistics | None) -> dict[str, jax.Array]:
    """Returns what is logged of a step's routers: see `train.log.metrics.Record`. `own` are the
    statistics of this device's tokens; nothing is logged without any."""
    if own is None:
        return {}
    whole = of_all_devices(own)
    every = whole.sum_over_layers()
    return {
        "balance_loss": load_balancing_loss(every),
        "router_z_loss": router_z_loss(every),
        "largest_over_mean": jnp.max(largest_over_mean(whole)),
    }
