"""Producers: record the GPU streams that compute gradients, so that later work waits for all of them.

Autograd runs each node, and its hooks, on the stream its forward ran on. A model that computes on several
streams writes a unit's gradients from several, while a collective waits for one alone: the one that is
current when it is issued. And memory that Python frees may be reused while another stream than the one it
was allocated on still works with it.
"""

from collections.abc import Callable

import torch

from zerolab.devices import current_stream


class Producers:
    """The streams on which one unit's gradients have come since they were last joined. On CPUs, none.

    Args: current: returns the stream that is current on the GPU with an index.
    Attributes: has_streams: whether the device has any.
    """

    def __init__(self, device: torch.device, current: Callable[[int], torch.cuda.Stream] = current_stream):
        self._device, self._current = device, current
        self.has_streams = device.type == "cuda"
        self._streams: set = set()

    def note(self) -> None:
        """The current stream has written a gradient, or waited for a reduction."""
        if self.has_streams:
            self._streams.add(self._current(self._device.index))

    def join(self, *buffers: torch.Tensor) -> None:
        """Have the current stream, which is about to read ``buffers``, wait for those that wrote to them."""
        if self._streams:
            current = self._current(self._device.index)
            others = self._streams - {current}
            for stream in others:
                current.wait_stream(stream)
            self._streams.add(current)
            for buffer in buffers if others else ():
                self.hold(buffer)
            self._streams.clear()

    def hold(self, buffer: torch.Tensor) -> None:
        """Have the allocator keep memory that is let go until all of them are done with it."""
        for stream in self._streams:
            buffer.record_stream(stream)
