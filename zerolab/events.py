"""Event and Traffic: one entry of a trace, and the sums over them."""

from dataclasses import dataclass, field

from zerolab.device_times import DeviceTimes, Measured

CONTROL = "control"
"""The phase of small messages that carry no tensor of the model: masks, norms, agreements. Counted apart."""


@dataclass(slots=True)
class Event:
    """One collective or one update, as one rank saw it.

    ``logical_bytes`` is the payload in the paper's convention (an all-reduce counts its payload twice);
    ``wire_bytes`` is what this rank sent, summed over the messages it handed to the network, and
    ``control_bytes`` what it sent to announce them.
    ``slices`` names what was touched, as ``"blocks.0.weight[0:3936]"``.
    ``start`` and ``end`` are the CPU's times. On a GPU they tell when the work was queued; the GPU's own
    times are in ``device``. ``ranks`` are those that take part, by their numbers among all ranks.
    """

    op: str
    unit: str
    phase: str
    step: int
    logical_bytes: int
    wire_bytes: int
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[str, ...]
    where: str
    start: float
    end: float | None = None
    control_bytes: int = 0
    device: DeviceTimes | Measured | None = None
    ranks: tuple[int, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float | None:
        """How long it was under way for the CPU; None while it still is."""
        return None if self.end is None else self.end - self.start

    @property
    def device_ms(self) -> float | None:
        """How long it took on the GPU; None on a CPU, and while it is under way. Waits for the GPU.

        For a collective this is the library's own measurement under TORCH_NCCL_ENABLE_TIMING=1. Otherwise it
        is the time from its issue to the end of the wait for it, which is the most it can have taken.
        """
        return None if self.device is None else self.device.total_ms

    @property
    def exposed_ms(self) -> float | None:
        """How long the computation on the GPU waited for it; None on a CPU. Waits for the GPU."""
        return None if self.device is None else self.device.exposed_ms

    @property
    def hidden_ms(self) -> float | None:
        """How much of `device_ms` lay beside computation; None where that is unknown."""
        if self.device_ms is None or self.exposed_ms is None:
            return None
        return max(0.0, self.device_ms - self.exposed_ms)

    def __str__(self) -> str:
        took = "  in flight" if self.seconds is None else f"{self.seconds * 1e3:8.3f} ms"
        if self.device_ms is not None:
            took += f" (GPU {self.device_ms:.3f} ms, {self.exposed_ms:.3f} ms exposed)"
        sizes = f"logical {self.logical_bytes:>10,} B  wire {self.wire_bytes:>10,} B"
        head = (
            f"{self.phase:<8} {self.op:<14} {self.unit:<12} {self.dtype:<8} {self.shape!s:<10} {sizes} {took}"
        )
        touched = "".join(f"\n           {piece}" for piece in self.slices)
        return f"{head}  {self.where}{touched}"


@dataclass
class Traffic:
    """Bytes one rank sent, in all and by operation; control messages stand apart and are not in the sums."""

    logical_bytes: int = 0
    wire_bytes: int = 0
    control_bytes: int = 0
    by_op: dict[str, "Traffic"] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Count one event, once in all and once under its operation."""
        if event.phase == CONTROL:
            self.control_bytes += event.wire_bytes
            return
        self.control_bytes += event.control_bytes
        self.logical_bytes += event.logical_bytes
        self.wire_bytes += event.wire_bytes
        if event.op != "update":
            op = self.by_op.setdefault(event.op, Traffic())
            op.logical_bytes += event.logical_bytes
            op.wire_bytes += event.wire_bytes
