"""Lesson 06's exercise on the peak: formulas that differ from the right one in one part or in two.

The right one is root + the largest sum of prefetch + 1 blocks that follow each other.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from math import prod

Blocks = Sequence[int]
TWICE = (
    "twice the parameters that are whole: are these bytes in 16 bits, or gradients as well? Return a number "
    "of parameters"
)
FOUR_TIMES = "4 times the parameters that are whole: are these bytes in fp32? Return a number of parameters"
# What a part of the formula may be instead: in words, and the function.
# fmt: off
CUTS: dict[str, Callable[[Blocks, int], list[Blocks]]] = {
    "": lambda blocks, n: [blocks[i:i + n] for i in range(len(blocks))],
    "the groups do not overlap: each block may be the one that computes":
        lambda blocks, n: [blocks[i:i + n] for i in range(0, len(blocks), max(n, 1))],
    "shorter groups at the end are left out":
        lambda blocks, n: [blocks[i:i + n] for i in range(len(blocks) - n + 1)],
    "a group ends with the block that computes: the blocks that come next are gathered, not those before":
        lambda blocks, n: [blocks[max(0, i - n + 1):i + 1] for i in range(len(blocks))],
    "the block that computes is not counted":
        lambda blocks, n: [blocks[i + 1:i + n] for i in range(len(blocks))],
    "the blocks are sorted, from small to large: they compute in the order of the list":
        lambda blocks, n: [sorted(blocks)[i:i + n] for i in range(len(blocks))],
    "the last group of full length is left out, and the shorter ones after it":
        lambda blocks, n: [blocks[i:i + n] for i in range(max(1, len(blocks) - n))],
    "the group that begins at the last block is left out":
        lambda blocks, n: [blocks[i:i + n] for i in range(len(blocks) - 1)],
    "blocks of equal size count once in a group: each of them is whole":
        lambda blocks, n: [sorted(set(blocks[i:i + n])) for i in range(len(blocks))],
    "after the last block a group goes on with the first ones: near the end fewer are left to gather":
        lambda blocks, n: [[blocks[(i + k) % len(blocks)] for k in range(n)] for i in range(len(blocks))],
    "after the last block a group goes on with the first ones: near the end fewer blocks are left to gather":
        lambda blocks, n: [[*blocks, *blocks][i:i + n] for i in range(len(blocks))],
    "only the first block and the last of a group are counted":
        lambda blocks, n: [[blocks[i], *blocks[i + max(n - 1, 1):i + n]] for i in range(len(blocks))],
}
SUMS: dict[str, Callable[[list[Blocks]], float]] = {
    "": lambda groups: max(map(sum, groups), default=0),
    "that is the mean over the groups: the peak is the largest":
        lambda groups: sum(map(sum, groups)) / len(groups) if groups else 0,
    "that is the smallest group's sum: the peak is the largest":
        lambda groups: min(map(sum, groups), default=0),
    "that is the first group's sum: take the largest": lambda groups: sum(groups[0]) if groups else 0,
    "that is the last group's sum: take the largest": lambda groups: sum(groups[-1]) if groups else 0,
    "that is the group whose first block is the largest: another group may have a larger sum":
        lambda groups: sum(_largest(groups, lambda group: sum(group[:1]))),
    "that is the group whose last block is the largest: another group may have a larger sum":
        lambda groups: sum(_largest(groups, lambda group: sum(group[-1:]))),
    "that is the second largest group's sum: take the largest":
        lambda groups: sorted(map(sum, groups))[-2] if len(groups) > 1 else 0,
    "that is the place of the largest group: return its size":
        lambda groups: max(range(len(groups)), key=lambda i: sum(groups[i]), default=0),
    "that is the number of blocks in the largest group: add up their sizes":
        lambda groups: len(_largest(groups, sum)),
    "the blocks of a group are multiplied: add them up":
        lambda groups: max(map(prod, groups), default=0),
    "the last block of the largest group is not counted":
        lambda groups: sum(_largest(groups, sum)[:-1]),
    "all groups are added up: take the largest": lambda groups: sum(map(sum, groups)),
    "only the largest block of a group is counted: all blocks of a group are whole":
        lambda groups: max((max(group, default=0) for group in groups), default=0),
}
LENGTHS: dict[str, Callable[[int], int]] = {
    "": lambda prefetch: prefetch + 1,
    "a group has prefetch blocks: the one that computes is whole, too": lambda prefetch: prefetch,
    "a group has prefetch + 2 blocks, one too many": lambda prefetch: prefetch + 2,
    "a group has prefetch + 3 blocks, two too many": lambda prefetch: prefetch + 3,
    "a group has 2 * prefetch + 1 blocks: only those that come are gathered ahead":
        lambda prefetch: 2 * prefetch + 1,
    "a group has prefetch blocks, and 1 where prefetch is 0: the block that computes is whole, too":
        lambda prefetch: max(prefetch, 1),
    "a group has 2 blocks also where prefetch is 0, and it is wrong only with prefetch=0":
        lambda prefetch: max(prefetch, 1) + 1,
    "a group has 2 blocks whatever prefetch is": lambda prefetch: 2,
    "a group has 1 block whatever prefetch is": lambda prefetch: 1,
}
TOTALS: dict[str, Callable[[float, int, Blocks, int], float]] = {
    "": lambda whole, root, blocks, prefetch: root + whole,
    "root is missing": lambda whole, root, blocks, prefetch: whole,
    "root is subtracted: it is whole beside the blocks": lambda whole, root, blocks, prefetch: whole - root,
    "root counts twice: it is whole once": lambda whole, root, blocks, prefetch: 2 * root + whole,
    "the blocks count twice": lambda whole, root, blocks, prefetch: root + 2 * whole,
    "root counts prefetch + 1 times: it is whole once":
        lambda whole, root, blocks, prefetch: (prefetch + 1) * root + whole,
    f"that is {TWICE}": lambda whole, root, blocks, prefetch: 2 * (root + whole),
    f"that is {FOUR_TIMES}": lambda whole, root, blocks, prefetch: 4 * (root + whole),
    "one is added: nothing else is whole": lambda whole, root, blocks, prefetch: root + whole + 1,
    "prefetch is added: it is a number of blocks, not of parameters":
        lambda whole, root, blocks, prefetch: root + whole + prefetch,
    "the largest block is added once more: gradients are not parameters":
        lambda whole, root, blocks, prefetch: root + whole + max(blocks),
    "all blocks are added once more": lambda whole, root, blocks, prefetch: root + whole + sum(blocks),
}
LISTS: dict[str, Callable[[int, Blocks], Blocks]] = {
    "": lambda root, blocks: blocks,
    "root stands before the first block, as if it were one of them: it is whole all the time":
        lambda root, blocks: [root, *blocks],
    "root stands behind the last block, as if it were one of them: it is whole all the time":
        lambda root, blocks: [*blocks, root],
    "the first block is left out": lambda root, blocks: blocks[1:],
    "the last block is left out": lambda root, blocks: blocks[:-1],
}
# fmt: on


def _largest(groups: list[Blocks], size: Callable[[Blocks], int]) -> Blocks:
    """Return the first group whose size is the largest."""
    return max(groups, key=size) if groups else []


PARTS = (LISTS, LENGTHS, CUTS, SUMS, TOTALS)
Formula = Callable[[int, Blocks, int], float]


def wrong_formulas() -> Iterator[tuple[str, Formula]]:
    """Each formula with one wrong part, then each with two; the words say what is wrong."""
    for wrong in (1, 2):
        for places in combinations(range(len(PARTS)), wrong):
            for chosen in product(*([key for key in PARTS[place] if key] for place in places)):
                said = dict(zip(places, chosen, strict=True))
                yield "; ".join(chosen), formula(*(said.get(place, "") for place in range(len(PARTS))))


def formula(of_list: str, of_length: str, of_cut: str, of_sum: str, of_total: str) -> Formula:
    """Return the function of root, blocks and prefetch whose parts have these names."""

    def value(root: int, blocks: Blocks, prefetch: int) -> float:
        groups = CUTS[of_cut](list(LISTS[of_list](root, blocks)), LENGTHS[of_length](prefetch))
        return TOTALS[of_total](SUMS[of_sum](groups), root, blocks, prefetch)

    return value


def explaining(fits: Callable[[Formula], bool]) -> str | None:
    """The words of the formulas that fit with the fewest wrong parts, the first two of them."""
    for wrong in (1, 2):
        found = [why for why, each in wrong_formulas() if why.count("; ") == wrong - 1 and fits(each)]
        if found:
            return ", or else ".join(found[:2])
    return None
