"""Lesson 08's first exercise: stage 2 with fully_shard.

No answer is compared with a model answer. A sharded model is trained on ranks, and what it sends and holds
decides.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from zerolab.course.attempts import attempt
from zerolab.course.exercise import graded
from zerolab.course.lessons.in_the_wild.sharded import RANKS, one_step
from zerolab.course.lessons.in_the_wild.solution import shard
from zerolab.course.names import names_in
from zerolab.course.wording import count


@graded(
    "On two ranks your model moves 2Ψ a step: each parameter is gathered once and reduced once, one block at "
    "a time. At rest each rank holds half of everything, and the gradients are the mean.",
    call="shard(model, mesh)",
    hints=(
        "fully_shard(module, mesh=mesh) makes a unit of the module's parameters, other than those that are "
        "in a unit already. So begin with the blocks.",
        "reshard_after_forward says whether a unit is freed after its forward and gathered again for "
        "backward. At stage 2 it is not.",
        "embedding, norm and head are outside of the blocks. fully_shard(model, mesh=mesh) takes them, last.",
    ),
    solution=[shard],
)
def check_shard(fn: Callable) -> str | None:
    """Call fn(model, mesh) on two ranks, take a step, and name what its messages and its gradients say."""
    outcome = attempt(partial(one_step, fn), [()] * RANKS, timeout=60.0)
    if outcome.failure:
        return outcome.failure.splitlines()[0] + _of_a_list(outcome.failure)
    code = getattr(fn, "__code__", None)
    outcome.values[0]["written"] = code is None or bool(code.co_freevars or names_in(fn))
    for reading in (_not_called, _not_sharded, _other_units, _changed, _not_stage_2):
        if found := reading(outcome.values[0]):
            return found
    return None


def _of_a_list(failure: str) -> str:
    """Whether fully_shard was called on a list of modules."""
    if "do not implement forward" not in failure:
        return ""
    return ". A ModuleList is a list, and has no forward: call fully_shard on each block in it"


def _not_called(seen: dict[str, Any]) -> str | None:
    """Whether fully_shard was called on the model at all, and in an order that torch takes."""
    if "stopped" in seen:
        return "the model was sharded before its blocks, so they are cut twice: fully_shard(model) comes last"
    if "wrapped" in seen:
        return (
            f"fully_shard was called on a {seen['wrapped']} around the model, and not on the model: a "
            "forward of the model itself does not gather the root's parameters. Call "
            "fully_shard(model, mesh=mesh)"
        )
    if not seen["units"] and seen["elsewhere"]:
        return (
            "the model that your function returned is sharded, and the one that it was called with is not: "
            "fully_shard works in place, so call it on model and its blocks themselves, and not on a copy"
        )
    if not seen["units"]:
        stub = "" if seen["written"] else "not written yet: "
        return f"{stub}fully_shard was not called, so nothing is sharded"
    return None


def _not_sharded(seen: dict[str, Any]) -> str | None:
    """Which parameters are whole, or sharded over another mesh."""
    if seen["whole"] and seen["root_is_unit"]:
        return (
            f"fully_shard(model) leaves {count(len(seen['whole']), 'parameter')} whole, {seen['whole'][0]} "
            "first: no rank reduces their gradients, and the ranks' copies drift apart. Do not pass "
            "ignored_params"
        )
    if seen["whole"]:
        return (
            f"{_these(seen['whole'])} not sharded: no rank reduces their gradients, and the ranks' copies "
            "drift apart. Call fully_shard(model, mesh=mesh) too, last"
        )
    if seen["other_mesh"]:
        return (
            f"{_these(seen['other_mesh'])} not sharded over the mesh that your function gets. Without "
            "mesh=mesh fully_shard makes one of all ranks. These are the same two ranks here, and others "
            "where a mesh has some of them. Pass mesh=mesh to every call"
        )
    if seen["whole_after"]:
        return (
            "parameters stay whole after backward, so between two steps a rank holds all of them: let it "
            "reshard them"
        )
    return None


def _these(names: Sequence[str]) -> str:
    """Parameters by number and name, with their verb."""
    if len(names) == 1:
        return f"1 parameter, {names[0]}, is"
    return f"{len(names)} parameters, {names[0]} first, are"


def _other_units(seen: dict[str, Any]) -> str | None:
    """Whether the units are others than the blocks."""
    if not any(seen["blocks"]) and seen["units"] > 1:
        return (
            f"no block is a unit of its own: the model has {seen['units']} other units, each with an "
            "all-gather and a reduce-scatter of its own. Make one unit of each block, then one of the model"
        )
    if not any(seen["blocks"]):
        return (
            "the whole model is one unit: all of it is gathered at once, and no gradient is freed before "
            "backward ends. Call fully_shard on every block first, then on the model"
        )
    if not all(seen["blocks"]):
        missing = seen["blocks"].index(False)
        return f"block {missing} is no unit of its own, so it is gathered with the root: shard every block"
    for block, many in enumerate(seen["inside"]):
        if many:
            which = f"{many} modules inside of block {block} are units of their own"
            if many == 1:
                which = f"a module inside of block {block} is a unit of its own"
            return f"{which}, so the block is gathered and reduced in pieces. Make one unit of each block"
    return None


def _changed(seen: dict[str, Any]) -> str | None:
    """What else was changed in the model."""
    if seen["frozen"]:
        first, why = seen["frozen"][0], "requires_grad=False after your function, so"
        said = f"{len(seen['frozen'])} parameters, {first} first, have {why} they get no gradients"
        if len(seen["frozen"]) == 1:
            said = f"{first} has {why} it gets no gradient"
        return f"{said}. Leave requires_grad as it is"
    if seen["dtypes"] != ["float32"]:
        return (
            f"the model's parameters are {' and '.join(seen['dtypes'])} after your function, and they were "
            "float32: leave their dtype as it is"
        )
    return None


def _not_stage_2(seen: dict[str, Any]) -> str | None:
    psi, root = seen["psi"], seen["root"]
    gathers = [numel for op, numel in seen["sent"] if op == "_allgather_base"]
    gathered, reduced = sum(gathers), sum(n for op, n in seen["sent"] if op == "_reduce_scatter_base")
    if reduced == 0:
        return "no gradient was reduced: set_requires_gradient_sync(False) is for micro-batches but the last"
    if gathered == 2 * psi - root:
        return (
            "that is stage 3: after forward each block is freed, and backward gathers it again, 3Ψ - Ψ_root "
            "in all. Keep the blocks whole between forward and backward"
        )
    if gathered == 2 * psi:
        return "that is stage 3, and the root is gathered twice too: 3Ψ. Keep parameters whole after forward"
    if psi in (2 * gathered, 2 * reduced):
        return (
            f"the bytes of a step are those of {gathered / psi:.2f}Ψ gathered and {reduced / psi:.2f}Ψ "
            "reduced in fp32: messages of 16-bit numbers have half of the bytes. A mixed-precision policy "
            "makes them so. Leave mp_policy out"
        )
    if (gathered, reduced) != (psi, psi):
        said = f"a step gathers {gathered / psi:.2f}Ψ and reduces {reduced / psi:.2f}Ψ; stage 2 has Ψ of each"
        return said + (_gathered_again(seen, gathered - psi) or _not_reduced(psi, reduced))
    if len(gathers) <= len(seen["blocks"]):
        return f"{len(gathers)} gathers for {len(seen['blocks'])} blocks and the root: blocks share a unit"
    if abs(seen["scale"] - 1) > 1e-3:
        return (
            f"the gradients are {seen['scale']:.3g} times the mean over the ranks: do not change the divisor"
        )
    return None


def _gathered_again(seen: dict[str, Any], more: int) -> str:
    """Which units a surplus of gathered elements is made of: the root, some blocks, or both."""
    blocks, root = len(seen["blocks"]), seen["root"]
    block = (seen["psi"] - root) // blocks
    for with_root, many in product((0, 1), range(blocks + 1)):
        if more and more == with_root * root + many * block:
            which = [f"{many} of the {blocks} blocks"] * bool(many) + ["the root"] * with_root
            verb = "is" if which == ["the root"] or (many == 1 and not with_root) else "are"
            return (
                f". In yours {' and '.join(which)} {verb} gathered twice: freed after forward, and gathered "
                "again for backward. Pass reshard_after_forward=False there"
            )
    return ""


def _not_reduced(psi: int, reduced: int) -> str:
    """How many elements of the gradients stay each rank's own."""
    if reduced >= psi:
        return ""
    return (
        f". {psi - reduced:,} of {psi:,} elements of the gradients are not reduced, so the ranks' copies of "
        "their parameters drift apart"
    )
