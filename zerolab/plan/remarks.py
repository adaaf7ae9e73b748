"""What a plan does not count, said below its table."""

from zerolab.memory import format_bytes, format_count
from zerolab.plan.question import Question

NOT_COUNTED = "Not counted: the CUDA context, fragmentation, buffers; keep a few GB free. 1 GB is 1e9 bytes."
COUNTED_WHOLE = (
    "Activations inside a block are counted whole on each GPU, though tensor parallelism cuts some of them."
)
IN_TRANSIT = "Not counted either: what is on its way in or out of the GPU at a time, one or two units."
HEAD_OF_ITS_OWN = (
    "The simulated model has a head of its own, where {name} uses its embedding again: it sends and updates "
    "{more} parameters more."
)
SIMULATED = (
    "Simulated: the engine's own step for one rank, played at these rates, with what it overlaps, and with "
    "the operations of attention and of the head. The GPUs of a copy are taken for a node."
)


def remarks(question: Question, simulated: bool) -> list[str]:
    """Return what the table does not count, and what it counts as more than it is."""
    said = [NOT_COUNTED]
    if question.has_shape:
        said.append(_logits(question))
    if question.has_shape and question.copies > 1:
        said += [_whole_units(question), _gathered_once(question)]
    if question.tensor_parallel > 1 and question.has_shape:
        said.append(COUNTED_WHOLE)
    if question.cpu_checkpointing or question.offload_optimizer is not None:
        said.append(IN_TRANSIT)
    if simulated:
        said += [SIMULATED, *_other_head(question)]
    return said


def _whole_units(question: Question) -> str:
    """How much the units take that stages 2 and 3 have whole at a time."""
    sizes = {stage: question.whole_unit_bytes(stage) for stage in (2, 3)}
    sizes_said = " and ".join(f"{format_bytes(size)} at stage {stage}" for stage, size in sizes.items())
    too_much = [stage for stage, size in sizes.items() if 0 <= question.spare_bytes(stage) < size]
    listed = " and ".join(map(str, too_much))
    warning = f" That is more than stage {listed} has to spare, so it does not fit." * bool(too_much)
    return f"Not counted either: the units that are whole at a time, about {sizes_said}.{warning}"


def _gathered_once(question: Question) -> str:
    """What the engine sends less than the paper counts."""
    less = format_bytes(question.gathered_once_bytes)
    return (
        f"At stage 3 the table has the paper's 3Ψ for what is sent. This engine sends {less} less, because "
        "it gathers the root unit once in a pass and keeps it."
    )


def _logits(question: Question) -> str:
    """What the output of the head takes; a loss in fp32 takes more."""
    size = question.batch * question.seq * question.model.vocab * question.element_bytes
    return f"The logits are not counted: {format_bytes(size)} wherever forward or the loss stores them."


def _other_head(question: Question) -> list[str]:
    """What is simulated otherwise, where the head of the model is its embedding."""
    if not question.model.tied:
        return []
    return [HEAD_OF_ITS_OWN.format(name=question.model.name, more=format_count(question.model.whole_psi))]
