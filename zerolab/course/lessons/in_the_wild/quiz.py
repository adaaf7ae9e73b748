"""Lesson 08's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

RANKS = 4
# The answers: bytes per parameter, Ψ, bytes per parameter, a rank.
HELD, MOVED, AT_REST, SILENT = 4 + 4 + 8 / RANKS, 2 + 1, 16 / RANKS, 2
HELD_BY_REDUNDANCY_OPTIMIZER = Prediction(
    {
        "you took plain DDP, and here the optimizer state is sharded": 16,
        "you sharded the gradients too, as stage 2 does, and DDP all-reduces whole ones": 7,
        "you divided everything by 4, which is stage 3": 4,
        "you counted one of Adam's m and v": 9,
    },
    "bytes per parameter",
    why="4 + 4 + 8/4: parameters and gradients are whole, and m and v are divided by four.",
)
MOVED_BY_REDUNDANCY_OPTIMIZER = Prediction(
    {
        "you took the paper's stage 1, which reduce-scatters, and DDP's all-reduce alone is 2Ψ": 2,
        "you counted the all-reduce once, and forgot the broadcast of the updated parameters": 1,
    },
    "Ψ",
)
MOVED_BY_DEEPSPEED = 3
DEEPSPEED_DEFAULT = Prediction(
    {
        "you took the paper's stage 2, which reduce-scatters, and by default DeepSpeed all-reduces": 2,
        "you counted the all-reduce once, and it is a reduce-scatter and an all-gather: 2Ψ": 1,
        "you counted two gathers of the parameters, and at stage 2 one is enough": 4,
    },
    "Ψ",
    why="An all-reduce of the gradients is 2Ψ, and the all-gather of the parameters Ψ.",
)
DDP_GRADIENTS = Prediction(
    {
        "you counted the gradients alone, and the buckets in which they are sent are a second copy": 4,
        "you counted Adam's m and v, too": 16,
    },
    "bytes per parameter",
)
KEPT_AFTER_FORWARD = Prediction(
    {
        "you took stage 2 between two steps, and `fully_shard` frees the parameters after backward": 7,
        "you took DDP": 16,
        "you took stage 1": 10,
    },
    "bytes per parameter",
    why="16/4: between two steps everything is sharded.",
)
SAME_BITS = Prediction(
    {
        "you took equal sums for equal bits, and another order changes some bits": 8,
        "you counted none, and zerolab's four stages add in the order of the single process": 0,
        "you left out stage 0, and it adds in the same order as stages 1 to 3": 3,
    },
    "engines",
)
CLOSE = Prediction(
    {
        "you took other bits for another model, and a sum in another order differs in its last bits": 4,
        "you left out ZeroRedundancyOptimizer, and it updates each parameter with the same mean and Adam": 7,
    },
    "engines",
)
ACROSS_NODES = Prediction(
    {
        "you counted all the gradients, and a rank all-reduces its own half of them": 2,
        "you took stage 3's, and here gathers stay inside a node": 3,
        "you counted the all-reduce once, and it is a reduce-scatter and an all-gather": 0.5,
    },
    "Ψ",
)
WAITS = Prediction(
    {
        "you hid all messages, and gathers can only hide behind the forward pass, which is shorter": 0,
        "you hid nothing": 2.2,
        "you hid no gather, and gathers go on beside the next forward pass": 1.1,
        "you took a third of 2.2 s for the forward pass, and it has 0.9": 0.37,
        "you hid all reductions, and the last ones have no computation left to hide behind": 0.2,
    },
    "seconds",
    tolerance=0.15,
)
MISSING_RANK = Prediction(
    {
        "you took the rank that wrote first, and a rank that writes is one that waits": 0,
        "you took rank 1, and it waits in collective 812 like 0 and 3": 1,
        "you took rank 3, and it waits in collective 812 like 0 and 1": 3,
    },
    tolerance=0,
)


def speed_up(linear: float) -> Prediction:
    """Return the speed-up of 400 GPUs over 64 if each of them were as busy as before."""
    return Prediction({"you took a linear speed-up, and each GPU has more memory than before": linear})


QUESTIONS = (
    Quiz(
        "A team trains with 16 micro-batches and moves from stage 1 with `no_sync()` to stage 3. “At most "
        "1.5 times the traffic”, says the paper. How many times as much do they measure?",
        "c",
        {
            "a": Choice(
                "1.5 times.",
                "3Ψ in place of 2Ψ is 1.5 times as much with one micro-batch. Here there are 16.",
            ),
            "b": Choice(
                "Less than once, because each rank holds less.",
                "Stage 3 holds less, and that is what it pays for with messages.",
            ),
            "c": Choice(
                "24 times.",
                "Stage 1 under `no_sync()` reduces once and moves 2Ψ for any M. Stage 3 gathers and reduces "
                "in every micro-batch: 3MΨ = 48Ψ.",
            ),
            "d": Choice(
                "1.5 times in bytes, but many more messages.",
                "There are more messages, and more bytes too: 3MΨ = 48Ψ in place of 2Ψ.",
            ),
        },
    ),
    Quiz(
        "`for block in model.blocks: fully_shard(block)`, and nothing else. It trains, and the loss falls. "
        "What is wrong?",
        "b",
        {
            "a": Choice(
                "Nothing: every block is sharded.",
                "Each block is sharded by its own call. What is in no block is not.",
            ),
            "b": Choice(
                "Embeddings and head drift apart, rank by rank.",
                "Embeddings, last norm and head are in no block. No rank reduces their gradients, so each "
                "rank trains its own. Call `fully_shard(model)` last.",
            ),
            "c": Choice(
                "It hangs at the head.",
                "Nothing waits: parameters that are not sharded are not communicated at all, so nothing "
                "hangs.",
            ),
        },
    ),
    Quiz(
        "The plan says 60.7 GB, the GPU has 80, and stage 3 runs out of memory in its first backward. Why?",
        "a",
        {
            "a": Choice(
                "Units are whole while they compute, and so are their gradients.",
                "While a unit computes it is whole, and so are its gradients until they are reduced. With "
                "the next one gathered ahead, that is 20.7 GB here.",
            ),
            "b": Choice(
                "The plan counts GB, the GPU GiB.",
                "They differ by 7 %. The step needs 81.4 GB here, a third more than the plan says.",
            ),
            "c": Choice(
                "Stage 3 was not active.",
                "A stage 3 that shards nothing would need 2,800 GB for the states alone.",
            ),
        },
    ),
    Quiz(
        "63 of 64 ranks log a timeout in collective 812. What do you do first?",
        "d",
        {
            "a": Choice(
                "Raise the timeout to an hour.",
                "The timeout is how long a rank waits. More time only makes the failure later if a rank "
                "never comes.",
            ),
            "b": Choice(
                "Look for an error on the 63 ranks.",
                "They wait for a message, so they are the victims, and their stacks say where they wait.",
            ),
            "c": Choice(
                "Replace the network card of the first rank that logged.",
                "A broken network stops single messages. Here all messages before number 812 arrived.",
            ),
            "d": Choice(
                "Get the stack of the 64th.",
                "It never called collective 812, so it has nothing to time out. Its stack says what it "
                "does instead: an error handler, a longer loop, a save on one rank.",
            ),
        },
    ),
    Quiz(
        '"We take twice the GPUs, so the run costs twice as much." With a linear speed-up, what is true?',
        "b",
        {
            "a": Choice(
                "It costs twice as much.",
                "Twice the GPUs cost twice as much an hour, but the run takes half as long.",
            ),
            "b": Choice(
                "It costs the same, and is done in half the time.",
                "The bill is price × GPUs × hours. With a linear speed-up hours fall as GPUs rise. With a "
                "super-linear one the run is cheaper on more GPUs, up to where the batch stops growing.",
            ),
            "c": Choice(
                "It costs half as much.",
                "For that each GPU would have to do twice as much in an hour as before.",
            ),
        },
    ),
)
