"""Lesson 06's exercise on the peak: any right style passes, and each wrong formula is named."""

import itertools

import pytest
from support.answers import together
from support.lessons import solutions_travel_by_value

from zerolab.course.lessons.zero_stage_3 import check_peak

solutions_travel_by_value(__name__)


def by_running_sum(root, blocks, prefetch):
    """Right: a running sum, and the difference of two of its values."""
    ends = [0, *itertools.accumulate(blocks)]
    last = len(blocks)
    return root + max(ends[min(i + prefetch + 1, last)] - ends[i] for i in range(last))


def by_simulation(root, blocks, prefetch):
    """Right: gathers and frees, and watches."""
    whole, peak, begun = 0, 0, 0
    for place, block in enumerate(blocks):
        while begun <= min(place + prefetch, len(blocks) - 1):
            whole += blocks[begun]
            begun += 1
        peak = max(peak, whole)
        whole -= block
    return float(root + peak)


def full_windows(root, blocks, prefetch):
    """Right: windows of full length are enough, because a shorter one is part of a longer one."""
    length = min(prefetch + 1, len(blocks))
    return max(sum(blocks[i : i + length], root) for i in range(len(blocks) - length + 1))


def too_short(root, blocks, prefetch):
    """Right as long as prefetch is smaller than the number of blocks."""
    windows = [sum(blocks[i : i + prefetch + 1]) for i in range(len(blocks) - prefetch)]
    return root + max(windows, default=0)


def full_windows_only(root, blocks, prefetch):
    return root + max(sum(blocks[i : i + prefetch + 1]) for i in range(len(blocks) - prefetch))


def last_of_sorted(root, blocks, prefetch):
    windows = [sum(blocks[i : i + prefetch + 1]) for i in range(len(blocks) - prefetch)]
    return root + sorted(windows)[-1]


RIGHT = [by_running_sum, by_simulation, full_windows]


def around(root, blocks, prefetch):
    count = len(blocks)
    return root + max(sum(blocks[(i + k) % count] for k in range(prefetch + 1)) for i in range(count))


def grouped(root, blocks, prefetch, step=lambda length: 1, length=lambda prefetch: prefetch + 1, of=max):
    """Groups of blocks that follow each other, with a knob for what a formula may get wrong."""
    size = length(prefetch)
    return root + of(sum(blocks[i : i + size]) for i in range(0, len(blocks), step(size)))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def before(root, blocks, prefetch):
    """The blocks before the one that computes, without that one."""
    return root + max(sum(blocks[max(0, i - prefetch) : i]) for i in range(len(blocks)))


def from_the_largest(root, blocks, prefetch):
    place = blocks.index(max(blocks))
    return root + sum(blocks[place : place + prefetch + 1])


def up_to_the_largest(root, blocks, prefetch):
    place = blocks.index(max(blocks))
    return root + sum(blocks[max(0, place - prefetch) : place + 1])


def without_the_last_group(root, blocks, prefetch):
    return root + max(sum(blocks[i : i + prefetch + 1]) for i in range(len(blocks) - 1))


def without_the_last_groups(root, blocks, prefetch):
    return root + max(sum(blocks[i : i + prefetch + 1]) for i in range(max(1, len(blocks) - prefetch - 1)))


def around_by_doubling(root, blocks, prefetch):
    twice = blocks + blocks
    return root + max(sum(twice[i : i + prefetch + 1]) for i in range(len(blocks)))


def as_a_set(root, blocks, prefetch):
    return root + max(sum(set(blocks[i : i + prefetch + 1])) for i in range(len(blocks)))


def place_of_the_largest(root, blocks, prefetch):
    return max(range(len(blocks)), key=lambda i: sum(blocks[i : i + prefetch + 1]))


def printed(root, blocks, prefetch):
    print(full_windows(root, blocks, prefetch))


def forgot_to_return(root, blocks, prefetch):
    full_windows(root, blocks, prefetch)


def wrong_once(root, blocks, prefetch):
    """A single wrong number, which is that of a known mistake by chance."""
    return 1008 if (root, prefetch) == (1000, 0) else full_windows(root, blocks, prefetch)


WRONG = [
    (from_the_largest, "that is the group that begins at the largest block: another group may have"),
    (up_to_the_largest, "that is the group that ends at the largest block"),
    (without_the_last_group, "the group that begins at the last block is left out"),
    (without_the_last_groups, "the last group of full length is left out"),
    (around_by_doubling, "after the last block a group goes on with the first ones"),
    (as_a_set, "blocks of equal size count once in a group"),
    (place_of_the_largest, "that is the place of the largest group: return its size"),
    (printed, "your function prints its result and returns None: write return in place of print"),
    (forgot_to_return, "your function computes, and returns None"),
    (wrong_once, "your function returned 1008, and 1009 parameters are whole. It is wrong only with"),
    (lambda *case: 2 * full_windows(*case), "are these bytes in 16 bits, or gradients as well?"),
    (lambda *case: 1.5 * full_windows(*case), "in every case it is 1.5 × the right number"),
    (
        lambda root, blocks, prefetch: full_windows(root, blocks, prefetch) + 2 * prefetch - blocks[0],
        "in every case it is the right number + 2 × prefetch - the first block",
    ),
    (
        lambda root, blocks, prefetch: grouped(root, blocks, prefetch, step=lambda size: size),
        "do not overlap",
    ),
    (lambda root, blocks, prefetch: grouped(root, blocks, prefetch, of=mean), "the mean over the groups"),
    (lambda root, blocks, prefetch: grouped(root, blocks, prefetch, of=sum), "all groups are added up"),
    (
        lambda root, blocks, prefetch: grouped(root, blocks, prefetch, length=lambda prefetch: 1) + prefetch,
        "a group has 1 block whatever prefetch is; prefetch is added",
    ),
    (lambda root, blocks, prefetch: grouped(0, [root, *blocks], prefetch), "as if it were one of them"),
    (
        lambda root, blocks, prefetch: full_windows(root, blocks, prefetch) + max(blocks),
        "the largest block is added once more",
    ),
    (lambda root, blocks, prefetch: 2 * full_windows(0, blocks, prefetch) + root, "the blocks count twice"),
    (
        lambda root, blocks, prefetch: root + sum(sorted(blocks)[: prefetch + 1]),
        "the blocks are sorted, from small to large",
    ),
    (before, "a group has prefetch blocks: the one that computes is whole, too"),
    (lambda root, blocks, prefetch: None, "not written yet"),
    (lambda root, blocks, prefetch: "many", "your function returned str 'many'"),
    (lambda root, blocks, prefetch: full_windows(0, blocks, prefetch), "root is missing"),
    (around, "after the last block that goes on with the first ones"),
    (lambda root, blocks, prefetch: full_windows(root, blocks, prefetch + 1), "one block too many"),
    (lambda root, blocks, prefetch: root + (prefetch + 1) * max(blocks), "times the largest block"),
    (lambda root, blocks, prefetch: root + (prefetch + 1) * sum(blocks) / len(blocks), "the mean block"),
    (lambda root, blocks, prefetch: root + sum(sorted(blocks)[-prefetch - 1 :]), "wherever they stand"),
    (lambda root, blocks, prefetch: root + sum(blocks[: prefetch + 1]), "the first prefetch + 1 blocks"),
    (lambda root, blocks, prefetch: root + sum(blocks), "as at stage 2"),
    (lambda root, blocks, prefetch: 4 * full_windows(root, blocks, prefetch), "bytes in fp32"),
    (lambda root, blocks, prefetch: root + full_windows(root, blocks, prefetch), "root counts twice"),
    (
        lambda root, blocks, prefetch: root + prefetch * max(blocks),
        "that is prefetch times the largest block",
    ),
    (lambda root, blocks, prefetch: full_windows(root, blocks, 1), "that is for prefetch=1"),
    (
        lambda root, blocks, prefetch: max(root, full_windows(0, blocks, prefetch)),
        "the larger of root and the blocks",
    ),
    (too_short, "shorter groups at the end are left out"),
    (lambda root, blocks, prefetch: full_windows(root, blocks, prefetch or 1), "only with prefetch=0"),
    (
        lambda root, blocks, prefetch: full_windows(root, blocks, prefetch) + 3,
        "returned 213, and 210 parameters are whole: in every case it is the right number + 3",
    ),
    (
        full_windows_only,
        "There are 5 blocks, so no 7 of them follow each other: then all are whole",
    ),
    (last_of_sorted, "IndexError: list index out of range, with root 100, blocks [50, 10, 40, 70, 30], pref"),
    (lambda root, blocks, prefetch: root + sum(blocks) // prefetch, "only the block that computes is whole"),
    (lambda root, blocks, prefetch: blocks[prefetch + 9], "your function stopped with IndexError"),
]
diagnose = together(check_peak, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_passes(right):
    assert diagnose(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose(wrong)
