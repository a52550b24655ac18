"""The contract between ops, their backends, and everything that chooses, records and measures.

A `Request` is one call of an op as data. A `Backend` executes requests, and answers questions about
them. `collective_matmul.dispatch`, `collective_matmul.tuning` and `explain` are written against the
two: they compare answers, and know no op and no backend.

A family of ops consists of

- a class of requests, a frozen dataclass that inherits `Request`;
- its backends in a `collective_matmul.dispatch.registry.Registry`, which requests return as
  `Request.backends`;
- one `collective_matmul.dispatch.registry.Op` for each of its names, which says how a request is
  read from a table, and how it is measured;
- the function that users call. It builds a request, passes it to
  `collective_matmul.dispatch.selection.choose`, and lets the backend execute it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from collective_matmul.data import Record
from collective_matmul.hardware import assumed_rates
from collective_matmul.source_location import SourceLocation
from collective_matmul.transport import Transport

Direction = Literal["forward", "backward"]

#: The name, among those of backends, of the computation alone, without its communication.
COMPUTE_ONLY = "compute_only"

#: The share of its communication that XLA hides in a backward pass. The table of H200 has 79
#: requests with a weight gradient: in nine of ten less was hidden, and in half of them nothing.
HIDDEN_SHARE = 0.25


class UnregisteredError(LookupError):
    """A record of a table is about something that this program has not registered.

    Another program may have: tables keep such records as they are.
    """


@dataclass(frozen=True)
class Prediction:
    """A backend's prediction for a request.

    Attributes:
      seconds: time on one device, including the matmul of a weight gradient if the request has one.
      relative_error: the prediction is believed if its gain over the reference exceeds this
        fraction.
      basis: source of the prediction, in words.
    """

    seconds: float
    relative_error: float
    basis: str


class Configuration(Protocol):
    """A configuration of a backend for a request, such as the tiling of its kernel."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values, which identify it among those of the same request."""
        ...


class Request(Protocol):
    """One call of an op as data: everything that the choice of a backend depends on.

    Implementations are frozen dataclasses that inherit this class. Requests that take equally long
    compare equal: what changes no time, such as `source`, is a field with ``compare=False``.
    Shapes, bytes and operations are those of one device.

    Attributes:
      op: name of the op, as users and tables have it.
      axis_name: the mesh axis to communicate over, or several.
      axis_size: number of devices on the axis, or on all of them together.
      transport: who moves its bytes, if that is not the affair of a backend's own kernels.
      divergent_axes: further mesh axes along which devices may execute the request a different
        number of times, because it is inside a branch or a loop.
      direction: whether this is the forward or the backward pass of the op that the user called.
      source: where the user called it.
      replaces: the user's collective that `collective_matmul.overlap` replaced by this op, or None.
    """

    op: str
    axis_name: str | tuple[str, ...]
    axis_size: int
    transport: Transport = "peer_copies"
    divergent_axes: tuple[str, ...] = ()
    direction: Direction = "forward"
    source: SourceLocation | None = None
    replaces: str | None = None

    # What decides.

    @property
    def backends(self) -> Backends:
        """The backends of the op's family."""
        ...

    @property
    def communicates(self) -> bool:
        """Whether more than one device takes part. If not, the reference executes it."""
        return self.axis_size > 1

    @property
    def flops(self) -> int:
        """Floating-point operations; 0 if arrays are empty, so that there is nothing to decide."""
        ...

    @property
    def bytes_communicated(self) -> int:
        """Bytes that each device sends."""
        ...

    @property
    def collectives(self) -> int:
        """Collectives that it executes one after another; 0 on one device."""
        return 1 if self.communicates else 0

    @property
    def communication_seconds(self) -> float:
        """Predicted seconds of its collectives alone, with `hardware.assumed_rates`."""
        gpu = assumed_rates()
        return self.collectives * gpu.collective_seconds + self.bytes_communicated / gpu.link_bytes

    @property
    def overlapped_seconds(self) -> float:
        """The part of `communication_seconds` that XLA hides if the reference executes it.

        In a forward pass the computation waits for what is gathered, and whatever follows waits
        for a sum: nothing is hidden. In a backward pass XLA can hide some of it under the matmul of
        a weight gradient.
        """
        return HIDDEN_SHARE * self.communication_seconds if self.direction == "backward" else 0.0

    # What tables have. They are keyed by flat requests.

    @property
    def flat(self) -> Self:
        """The request that stands for all requests of equal work; its axis has no name."""
        ...

    @property
    def is_tabled(self) -> bool:
        """Whether tables have entries of such requests. If not, models decide about them."""
        return True

    def fields(self) -> dict[str, Any]:
        """The flat request as JSON values, with "op". `Op.request_of` reads them.

        Raises:
          ValueError: if `is_tabled` is False.
        """
        ...

    @property
    def kind(self) -> Hashable:
        """All but the sizes: entries of requests of one kind say something about each other."""
        ...

    @property
    def layer(self) -> Hashable:
        """All sizes but `rows`: times of one layer are interpolated between numbers of rows."""
        ...

    @property
    def rows(self) -> int:
        """The size that changes most between calls of one layer, such as its tokens; above 0."""
        ...

    @property
    def order(self) -> tuple:
        """The sort key of entries in a file, layer by layer."""
        ...

    def doublings(self, other: Self) -> float:
        """The distance of two flat requests of one kind, in doublings of the rows.

        Entries up to one doubling away are used where nothing nearer was measured.
        """
        ...

    # What `explain` shows. `str` of a request is for errors and progress.

    def __str__(self) -> str:
        passed = "" if self.direction == "forward" else " (backward)"
        return f"{self.op}{passed} {self.shapes}"

    @property
    def shapes(self) -> str:
        """Local shapes, dtypes and axis as text."""
        ...

    @property
    def remarks(self) -> Sequence[str]:
        """Remarks for users, which precede the reason of the decision."""
        return ()

    def multiplied_by(self, backend: Backend) -> tuple[str, str] | None:
        """Value of `Decision.multiplied_dtypes`; None if the request's dtypes are not in doubt."""
        del backend

    def line_dtypes(self, multiplied: tuple[str, str] | None) -> str:
        """The dtypes that travel and that are multiplied; "" if `shapes` says it all.

        Args:
          multiplied: what `multiplied_by` returned for the chosen backend.
        """
        del multiplied
        return ""


class Backend(Protocol):
    """A way to execute the ops of a family. Subclasses inherit answers that suit most backends.

    Attributes:
      name: name for the argument `implementation`.
      uses_peer_kernels: whether its kernels address the memory of peer GPUs, so that only programs
        may have them for which `overlap_jit` decides so, or is told to.
      copies_between_peers: whether it hides transfers that should be copies between peers, for
        which no multiprocessor works. With another transport it is chosen by measurement only.
      predicts_precisely: whether its prediction may be compared with measurements of other
        backends. Else it counts only where no other backend was measured either.
    """

    name: str
    uses_peer_kernels: bool = False
    copies_between_peers: bool = False
    predicts_precisely: bool = True

    def execute(self, request: Any, /, *operands: Any, **options: Any) -> Any:
        """Executes a request inside its `jax.shard_map`.

        Operands and results are the family's own affair: dispatch returns the backend, and the op
        that asked for it calls this.
        """
        raise TypeError(f"{self.name} executes {request} by a method of another name")

    def lacking_reason(self, request: Any, /) -> str | None:
        """Why it has no function for such requests; None if it has.

        Asked first. If there is a reason, no other question is asked about the request.
        """
        del request

    def unsupported_reason(self, request: Any, /) -> str | None:
        """Why it cannot execute a request, as part of a sentence; None if it can.

        While the request is being traced, call this inside its `jax.shard_map`.
        """
        ...

    def unprofitable_reason(self, request: Any, /) -> str | None:
        """Why it should not be chosen for a request that it can execute; None if nothing is wrong.

        The reason continues a sentence that begins with the backend's name, as "would hide
        nothing". Users are warned once where the backend would be the fastest otherwise.
        """
        del request

    def predict(self, request: Any, /) -> Prediction | None:
        """The predicted time of a request on the devices of the traced program; None if unknown.

        If it is the fastest for a request that it cannot execute, a warning says what is missed.
        """
        ...

    def multiplied_dtypes(self, request: Any, /) -> tuple[str, str] | None:
        """The dtypes in which it multiplies two operands; None if they are the request's own.

        While the request is being traced, call this inside its `jax.shard_map`.
        """
        del request

    def configurations(self, request: Any, /) -> Sequence[Configuration]:
        """The configurations to tune a request over, the likeliest to be fastest first."""
        del request
        return ()

    def configured(self, configuration: Configuration) -> Self:
        """This backend with one fixed configuration."""
        raise ValueError(f"{self.name} has no configurations, and {configuration} was given")

    def configuration_record(
        self, request: Any, configuration: Configuration, microseconds: float, /
    ) -> Record:
        """The record of a measured configuration, in the data that is called ``<name>_configs``."""
        return Record({"site": str(request)}, {self.name: microseconds}, configuration.to_json())


class Backends(Mapping[str, Backend]):
    """The backends of one family by name; `collective_matmul.dispatch.registry` implements it.

    Attributes:
      reference: the backend that others must beat, and that executes every request: XLA's own
        collectives and computation, one after the other. Every family names it "xla".
      substitute: what replaces the reference where its `unprofitable_reason` speaks against it; or
        None.
      argument: the name of the ops' argument that requests backends.
    """

    argument: str = "implementation"

    @property
    @abstractmethod
    def reference(self) -> Backend:  # noqa: D102
        ...

    @property
    @abstractmethod
    def substitute(self) -> Backend | None:  # noqa: D102
        ...

    @abstractmethod
    def current_name(self, name: str) -> str:
        """Today's name of a backend, with a DeprecationWarning for a name of an earlier release."""


class Measurement(Protocol):
    """Programs that repeat a request, for `collective_matmul.tune` to compile and to time.

    `collective_matmul.dispatch.repetitions.Repetitions` implements all but the op's own part.

    Attributes:
      repetitions: how often a program executes the request.
      prepares: whether operands are prepared before they are timed.
    """

    repetitions: int
    prepares: bool

    def program(self, backend: str) -> Callable[[Any], Any]:
        """A function of the operands that executes all repetitions with a backend."""
        ...

    def operands(self, implementation: str) -> Any:
        """The global shapes of a program's arguments: a named tuple with a field ``weights``.

        ``weights`` has the operands that each repetition has to itself. Programs of all backends
        and that of `COMPUTE_ONLY` share them; other operands may be larger for `COMPUTE_ONLY`,
        which has them gathered already.
        """
        ...

    def plain_operands(self, implementation: str) -> Any:
        """The operands before `prepare`: arrays of random numbers are made of these shapes."""
        ...

    def prepare(self, operands: Any) -> Any:
        """A program's arguments from those of `plain_operands`."""
        ...


def size_above_zero(value: Any) -> int:
    """A size in `Request.fields`, checked.

    Raises:
      ValueError: for other values.
    """
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"the size {value!r}, expected a whole number above zero")
    return value
