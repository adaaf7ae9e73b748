"""The losses that the training program prints."""

import re

EPOCH = re.compile(r"rank (\d)  epoch +(\d+)  loss (\d+\.\d+)")


def losses_by_rank(output: str) -> dict[int, list[float]]:
    found = {}
    for rank, epoch, loss in EPOCH.findall(output):
        losses = found.setdefault(int(rank), [])
        losses.append(float(loss))
        assert len(losses) == int(epoch)
    return found
