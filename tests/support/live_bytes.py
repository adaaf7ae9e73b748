"""Count the bytes of all storages in this process, by asking the garbage collector for tensors."""

import gc
import time

import torch


def live_bytes() -> int:
    """The bytes of every storage that any tensor in this process is about, however it is held."""
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and _has_memory(thing):
                storage = thing.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def settled_bytes() -> int:
    """The bytes that are live when nothing changes any more: a thread may hold the last message a while."""
    seen = [live_bytes()]
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        time.sleep(0.1)
        seen.append(live_bytes())
    return seen[-1]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Shapes alone, on the meta device, hold nothing, and neither does the marker of a gradient moved out."""
    return not tensor.is_meta and type(tensor).__name__ != "ReducedGradient"
