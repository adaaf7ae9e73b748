"""Lesson 08's predictions and its quiz."""

from zerolab.course.questions import Prediction, Quiz

RANKS = 4
HELD_BY_REDUNDANCY_OPTIMIZER = Prediction(
    {
        "that is plain DDP: the optimizer state is sharded here": 16,
        "the gradients were sharded too, which is stage 2; DDP all-reduces whole ones": 7,
        "everything was divided by 4, which is stage 3": 4,
        "only one of Adam's m and v was counted": 9,
    },
    "bytes per parameter",
)
MOVED_BY_REDUNDANCY_OPTIMIZER = Prediction(
    {
        "that is the paper's stage 1, which reduce-scatters; DDP all-reduces, which alone is 2Ψ": 2,
        "the broadcast of the updated parameters was forgotten, and the all-reduce counts twice": 1,
    },
    "Ψ",
)
DDP_GRADIENTS = Prediction(
    {
        "that is the gradients alone; the buckets in which they travel are a second copy": 4,
        "that counts Adam's m and v; only gradients were asked for": 16,
    },
    "bytes per parameter",
)
KEPT_AFTER_FORWARD = Prediction(
    {
        "that is stage 2 at rest; fully_shard frees the parameters after backward": 7,
        "that is DDP": 16,
        "that is stage 1": 10,
    },
    "bytes per parameter",
)
SAME_BITS = Prediction(
    {
        "all eight compute the same sums, but in other orders, and that changes the last bits": 8,
        "zerolab's four stages add in the order of the single process": 0,
        "stage 0 adds in the same order as stages 1 to 3": 3,
    },
    "engines",
)
ACROSS_NODES = Prediction(
    {
        "that is all the gradients; a rank all-reduces its own half of them": 2,
        "that is stage 3's; gathers stay inside a node here": 3,
        "an all-reduce counts twice: a reduce-scatter and an all-gather": 0.5,
    },
    "Ψ",
)
MISSING_RANK = Prediction(
    {
        "rank 0 wrote first, but it waits like the others: whoever waits writes": 0,
        "rank 1 waits in collective 812 like 0 and 3": 1,
        "rank 3 waits in collective 812 like 0 and 1": 3,
    },
    tolerance=0,
)


def speed_up(linear: float) -> Prediction:
    """The speed-up of 400 GPUs over 64 if each of them were as busy as before."""
    return Prediction({"that is linear: each GPU does as much as before, but it has more memory": linear})


SWITCHED_TO_STAGE_3 = Quiz(
    "c",
    {
        "a": "3Ψ in place of 2Ψ is 1.5 times as much with one micro-batch. Here there are 16.",
        "b": "stage 3 holds less, and that is what it pays for with messages.",
        "c": "stage 1 under no_sync() reduces once and moves 2Ψ for any M. Stage 3 gathers and reduces in "
        "every micro-batch: 3MΨ = 48Ψ.",
        "d": "there are more messages, and more bytes too: 3MΨ = 48Ψ in place of 2Ψ.",
    },
)
NOT_SHARDED = Quiz(
    "b",
    {
        "a": "each block is sharded by its own call. What is in no block is not.",
        "b": "embeddings, last norm and head are in no block. No rank reduces their gradients, so each rank "
        "trains its own. Call fully_shard(model) last.",
        "c": "nothing waits: parameters that are not sharded are not communicated at all, so nothing hangs.",
    },
)
SMALLER_THAN_PLANNED = Quiz(
    "a",
    {
        "a": "while a unit computes it is whole, and so are its gradients until they are reduced. With the "
        "next one gathered ahead, that is 20.7 GB here.",
        "b": "GB and GiB differ by 7 %, and 80 GB is said in GB by both.",
        "c": "a stage 3 that shards nothing would need 2,800 GB for the states alone.",
    },
)
SILENT_RANK = Quiz(
    "d",
    {
        "a": "the timeout is how long a rank waits. More time only makes the failure later if a rank never "
        "comes.",
        "b": "they wait for a message, so they are the victims, and their stacks say where they wait.",
        "c": "a broken network stops single messages. Here all messages before number 812 arrived.",
        "d": "it never called collective 812, so it has nothing to time out. Its stack says what it does "
        "instead: an error handler, a longer loop, a save on one rank.",
    },
)
TWICE_THE_GPUS = Quiz(
    "b",
    {
        "a": "twice the GPUs cost twice as much an hour, but the run takes half as long.",
        "b": "the bill is price × GPUs × hours. With a linear speed-up hours fall as GPUs rise. With a "
        "super-linear one the run is cheaper on more GPUs, up to where the batch stops growing.",
        "c": "only if each GPU did more in an hour than before, which is the super-linear case.",
    },
)
