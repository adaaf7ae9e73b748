"""Session: one loop on a rank. The engine and replicas do every action, and what they saw is compared."""

import math
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import zerolab
from support.loops.engine_side import EngineSide, ProcessGroups
from support.loops.plans import Action, Loop
from support.loops.replicas_side import ReplicasSide
from support.loops.user_code import set_flags

PACKAGE = str(Path(zerolab.__file__).parent)
CRASHES = (AssertionError, AttributeError, LookupError, NameError, ArithmeticError, RecursionError)
TRANSPORT = r"gloo|[Cc]onnection|Timed out"
STALE = "modified by an inplace operation"
"""Autograd's error for a backward pass through parameters that were updated in the meantime."""
DISAGREEMENT = ("ranks took different paths", "ranks disagree")


@dataclass
class Report:
    """What came of a loop. ``problem``: empty where all is well. ``refused``: (action, error) pairs."""

    seed: int
    actions: int = 0
    problem: str = ""
    at: Action = ()
    refused: list[tuple[str, str]] = field(default_factory=list)


WRITE_LOST = "was written to while it was gathered"
"""The error that says that an earlier write is lost. The replicas have that write, so the loop ends."""


def is_clear(error: Exception) -> bool:
    """Whether an error is one of the engine's own, raised on purpose and with a text."""
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and frames[-1].filename.startswith(PACKAGE) and frames[-1].line.startswith("raise ")
    return own and not isinstance(error, CRASHES) and not re.search(TRANSPORT, str(error))


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Session:
    """A loop under way on this rank of the launch, which may be no member of the loop's world."""

    def __init__(self, seed: int, loop: Loop, groups: ProcessGroups, folder: Path):
        self.loop, self.groups, self.folder = loop, groups, folder
        self.report = Report(seed)
        self.rank = dist.get_rank()
        self.plain = ReplicasSide(loop, self.rank)
        self.setting = loop.setting
        self.engine = None
        if self.rank < self.setting.world_size:
            self.engine = EngineSide(loop, self.setting, groups, folder)

    def run(self) -> Report:
        """Do the loop's actions until one shows a problem; look at everything in the end."""
        for action in (*self.loop.actions, ("look",)):
            (self.folder.parent / f"progress-{self.rank}").write_text(
                f"{self.report.seed} {self.report.actions}"
            )
            self.report.actions += 1
            kind, text = self.act(action)
            found: list = [None] * dist.get_world_size()
            dist.all_gather_object(found, (kind, text, self.rank))
            members = [each for each in found if each[0] != "absent"]
            if self.judge(action, members):
                break
            if kind == "absent" and members[0][0] == "done":
                self.follow(action)
        return self.report

    def judge(self, action: Action, found: list[tuple[str, str, int]]) -> bool:
        """Take note of what the ranks found; whether the loop ends here."""
        kinds = {kind for kind, *_ in found}
        wrong = [(text, rank) for kind, text, rank in found if kind == "problem"]
        if not wrong and len(kinds) > 1:
            wrong = [(f"{kind} {text}", rank) for kind, text, rank in found if kind != "done"]
        if wrong:
            self.report.problem = f"rank {wrong[0][1]} of {len(found)}: {wrong[0][0]}"
            self.report.at = action
        elif kinds == {"refused"}:
            self.report.refused.append((action[0], found[0][1]))
            self.recover()
        lost = kinds == {"refused"} and WRITE_LOST in found[0][1]
        return bool(wrong) or lost or kinds == {"both raised"}

    def recover(self) -> None:
        if self.engine:
            self.engine.recover()
        self.plain.recover()

    def act(self, action: Action) -> tuple[str, str]:
        """Do one action: "done", "refused", "both raised", or "problem" with a text."""
        name, *arguments = action
        if name == "resume_elsewhere":
            return self.resume_elsewhere(*arguments)
        if self.engine is None:
            return "absent", ""
        try:
            seen = getattr(self.engine, name)(*arguments)
        except Exception as error:
            return self.explain(error, name, arguments)
        try:
            expected = getattr(self.plain, name)(*arguments)
        except Exception as error:
            return "problem", f"only the replicas raised {in_words(error)}"
        wrong = [*differences(seen, expected), *self.visible_differences()]
        return ("problem", f"differs: {', '.join(wrong[:3])}") if wrong else ("done", "")

    def follow(self, action: Action) -> None:
        """On a rank that is no member: do to the replicas what the members did."""
        if action[0] != "resume_elsewhere":
            getattr(self.plain, action[0])(*action[1:])

    def explain(self, error: Exception, name: str, arguments: list) -> tuple[str, str]:
        """What an error of the engine's is: a refusal, one that replicas raise too, or a problem."""
        text = in_words(error)
        if is_clear(error):
            disagreeing = any(words in text for words in DISAGREEMENT)
            return ("problem" if disagreeing else "refused"), text
        try:
            getattr(self.plain, name)(*arguments)
        except Exception:
            return "both raised", text
        if STALE in text:
            return "refused", text
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "problem", f"unclear error {text} at {Path(where.filename).name}:{where.name}"

    def visible_differences(self) -> Iterator[str]:
        """Where buffers differ as they lie in the model, and where the loop reads them parameters, too.

        At stage 3 there are none to read.
        """
        seen = self.engine.buffers()
        if self.setting.stage < 3 and self.loop.reads:
            seen |= {name: p.detach() for name, p in self.engine.model.named_parameters()}
        expected = self.plain.look()
        return differences(seen, {name: expected[name] for name in seen})

    def save(self) -> tuple[str, str] | None:
        """Save on the members; what it came to if it was not done. Every rank of the launch comes here."""
        mine, found = None, [None] * dist.get_world_size()
        if self.engine:
            try:
                self.engine.save()
            except Exception as error:
                mine = self.explain(error, "save", [])
        dist.all_gather_object(found, mine)
        return next((each for each in found if each), None)

    def resume_elsewhere(self, setting, seed: int) -> tuple[str, str]:
        """Save on the ranks there are, and load on those of another setting."""
        if refused := self.save():
            return refused if self.engine else ("absent", "")
        try:
            flags, lr = self.plain.flags(), self.plain.added_lr
            self.plain.resume_elsewhere(setting, seed)
            self.setting, self.engine = setting, None
            if self.rank < setting.world_size:
                self.engine = EngineSide(self.loop, setting, self.groups, self.folder, seed, lr)
                set_flags(self.engine.model, flags)
                self.engine.is_saved = True
                self.engine.load()
        except Exception as error:
            return "problem", f"could not resume: {in_words(error)}"
        return ("done" if self.engine else "absent"), ""


def differences(seen, expected) -> Iterator[str]:
    """Where two answers differ in a bit, wherever the tensors are."""
    if isinstance(seen, dict):
        if seen.keys() != expected.keys():
            yield f"names {sorted(seen.keys() ^ expected.keys())}"
        for name in seen.keys() & expected.keys():
            if not same(seen[name], expected[name]):
                yield name
    elif isinstance(seen, float) and isinstance(expected, float):
        if seen != expected and not (math.isnan(seen) and math.isnan(expected)):
            yield f"{seen!r} where replicas have {expected!r}"
    elif seen != expected:
        yield f"{seen} where replicas have {expected}"


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    ours, theirs = ours.cpu(), theirs.cpu()
    return torch.equal(ours, theirs) or bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())
