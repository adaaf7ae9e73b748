"""Shrinking: the smallest loop that still shows a problem of the same kind."""

import re
from collections.abc import Iterator
from dataclasses import replace

from support.loops import campaign
from support.loops.plans import Loop, Setting
from support.loops.session import Report

MOST_TRIALS = 150


def kind_of(report: Report) -> str:
    """What two reports of one cause have in common: the action, and the problem without its numbers."""
    text = re.sub(r"rank \d+( of \d+)?[:,]? ?", "", report.problem)
    if "differs" in text or "silent" in text:
        text = text.split(":")[0]
    text = re.sub(r"'[^']*'|\[[^]]*\]|\([^)]*\)|[\w.]*\d[\w.]*", "…", text)
    action = f"alone: {report.at[1][0]}" if isinstance(report.at[0], int) else report.at[0]
    return text if text == "differs" else f"{action}: {text}"[:160]


def smaller(loop: Loop) -> Iterator[Loop]:
    """Loops with one thing less, the largest steps first."""
    count = len(loop.actions)
    size = max(count // 2, 1)
    while size and count:
        for start in range(0, count, size):
            yield replace(loop, actions=loop.actions[:start] + loop.actions[start + size :])
        size //= 2
    for index in range(len(loop.kinds)):
        yield replace(loop, kinds=loop.kinds[:index] + loop.kinds[index + 1 :])
    for index, kind in enumerate(loop.kinds):
        if kind != "linear":
            yield replace(loop, kinds=(*loop.kinds[:index], "linear", *loop.kinds[index + 1 :]))
    for plain in (
        {"tied": False},
        {"frozen": ()},
        {"held": ()},
        {"lists_frozen": False},
        {"optimizer": "SGD"},
    ):
        yield replace(loop, **plain)
    for name in ("precision", "units", "prefetch", "in_flight"):
        yield replace(loop, setting=replace(loop.setting, **{name: getattr(Setting, name)}))
    for name, least in (("stage", 0), ("world_size", 1)):
        one_less = max(getattr(loop.setting, name) - 1, least)
        yield replace(loop, setting=replace(loop.setting, **{name: one_less}))


def shrunk(loop: Loop, report: Report, backend: str = "gloo") -> tuple[Loop, Report, int]:
    """The smallest loop found, its report, and how many were tried."""
    wanted, trials = kind_of(report), 0
    if not loop.odd:
        loop = replace(loop, actions=loop.actions[: report.actions])
    while trials < MOST_TRIALS:
        candidates = [each for each in dict.fromkeys(smaller(loop)) if each != loop and is_possible(each)]
        reports = campaign.run([(report.seed, each) for each in candidates], backend)
        for each, found in zip(candidates, reports, strict=True):
            trials += 1
            if found.problem and kind_of(found) == wanted:
                loop, report = each, found
                break
        else:
            break
    return loop, report, trials


def is_possible(loop: Loop) -> bool:
    return loop.odd is None or loop.odd[0] < loop.setting.world_size > 1
