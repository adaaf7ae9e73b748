"""Loops that end with something that one rank does alone: a clear error, or the bits are right anyway."""

import copy
import json
import tempfile
import warnings
from pathlib import Path

import torch.distributed as dist

import zerolab
from support.loops.plans import Action, Loop
from support.loops.session import Report, Session, differences, in_words, is_clear
from zerolab.parity.reference import compute_deterministically

TAIL = (("train", 1), ("step",), ("train", 2), ("step",), ("look",))
OWN_SHARE = {
    "train",
    "forward",
    "evaluate",
    "without_sync",
    "raise_in_forward",
    "raise_inside",
    "raise_in_closure",
    "freeze",
    "thaw",
    "raise_in_backward",
    "slope",
}
"""What a replica can do alone: the others' gradients are averaged with whatever its own are then."""
PATIENCE_SECONDS = 60
RETURNED = "which had returned by then"
"""What a launch says of a rank that did more than the others, which have ended."""


def run_odd(seed: int, loop: Loop, backend: str) -> Report:
    """One launch for one loop, because ranks that part leave messages that nobody takes."""
    report = Report(seed, len(loop.actions) + len(TAIL) + 1, at=loop.odd)
    with tempfile.TemporaryDirectory() as folder:
        try:
            size = loop.setting.world_size
            ranks = zerolab.launch(
                part, size, seed, loop, Path(folder), backend=backend, timeout=PATIENCE_SECONDS
            )
        except zerolab.WorkerError as error:
            said = Path(folder) / f"error-{error.rank}"
            clear, text = json.loads(said.read_text()) if said.exists() else (False, str(error))
            report.refused = [("alone: " + loop.odd[1][0], text)]
            report.problem = (
                "" if clear or RETURNED in str(error) else f"rank {error.rank}, unclear error: {text}"
            )
        except zerolab.LaunchTimeout as error:
            report.problem = f"hang: {str(error).splitlines()[0]}"
        else:
            report.problem = judge(ranks)
    return report


def judge(ranks: list[dict[str, list[str]]]) -> str:
    """Without an error every rank must have the bits of one and the same way to see it."""
    if any(all(not rank[way] for rank in ranks) for way in ranks[0]):
        return ""
    wrong = {way: [rank[way][:2] for rank in ranks] for way in ranks[0]}
    return f"silent, by rank: {wrong}"


def part(seed: int, loop: Loop, folder: Path) -> dict[str, list[str]]:
    """On a rank: the common actions, then what one does alone, then one more step of all."""
    warnings.simplefilter("ignore")
    compute_deterministically()
    session = Session(seed, loop, {loop.setting.world_size: dist.group.WORLD}, folder / "loop")
    if session.run().problem:
        return {"before": []}  # found by the loops that all ranks take together
    session.recover()
    try:
        return apart(session, *loop.odd)
    except Exception as error:
        (folder / f"error-{session.rank}").write_text(json.dumps([is_clear(error), in_words(error)]))
        raise


def apart(session: Session, odd: int, alone: Action) -> dict[str, list[str]]:
    """What differs from replicas in which nobody, and from some in which one, did this."""
    engine, mine = session.engine, session.rank == odd
    ways = {"without it": session.plain}
    if alone[0] in OWN_SHARE | {"skip"}:
        ways["with its share"] = copy.deepcopy(session.plain)
    if mine and alone[0] != "skip":
        getattr(engine, alone[0])(*alone[1:])
    if alone[0] in OWN_SHARE:
        ways["with its share"].ranks = [odd]
        getattr(ways["with its share"], alone[0])(*alone[1:])
        ways["with its share"].ranks = session.plain.ranks
    last = {}
    for name, *arguments in TAIL:
        skipped = alone[0] == "skip" and (name, *arguments) == TAIL[0]
        if not (mine and skipped):
            seen = getattr(engine, name)(*arguments)
        for way, plain in ways.items():
            everybody = plain.ranks
            if skipped and way != "without it":
                plain.ranks = [rank for rank in everybody if rank != odd]
            last[way] = getattr(plain, name)(*arguments)
            plain.ranks = everybody
    return {way: list(differences(seen, last[way])) for way in ways}
