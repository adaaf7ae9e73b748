"""Lesson 07's predictions and its quiz."""

from zerolab.course.questions import Prediction
from zerolab.course.quizzes import Choice, Quiz

CHECKPOINTS = Prediction(
    {
        "you counted 4 bytes for a number, and these have 16 bits": 134.2,
        "you counted all 12 tensors of a block, and checkpointing keeps its input alone": 805.3,
        "you counted one block, and there are 125": 0.5369,
        "you divided by the 16 GPUs of a copy, and each of them keeps the whole input": 4.194,
        "you forgot that a number has 2 bytes": 33.55,
    },
    "GB",
    why="125 blocks × 32 sequences × 1,024 tokens × 8,192 features × 2 bytes.",
)
VOLUME = Prediction(
    {
        "you counted forward alone, or each all-reduce once, and its two halves send b·s·h each": 4,
        "you counted one of the two pairs of layers": 2,
        "you counted the three linear layers of the queries, keys and values apart": 12,
    },
    "b·s·h",
    tolerance=1e-6,
    why="Two pairs of layers, each with g in forward and f in backward: 4 all-reduces of 2·b·s·h.",
)
RECOMPUTED = Prediction(
    {
        "you counted as the paper does: forward's two all-reduces, once more": 12,
        "you took it that nothing is sent again, but the block's forward runs again": 8,
        "you repeated backward, and it is forward that runs again": 16,
    },
    "b·s·h",
    tolerance=1e-6,
    why="One of forward's two all-reduces is repeated.",
)
OFFLOADED = Prediction(
    {
        "you took the state of all ranks, and each has its own shard": 4.018,
        "you took m and v, and the fp32 master weights are optimizer state too": 0.6697,
        "you took 16 bytes a parameter, and parameters and gradients stay on the device": 1.339,
    },
    "MB",
    why="KΨ/N: 12 bytes × 334,848 parameters / 4 ranks, and a little padding.",
)
MOVED_IN_A_STEP = Prediction(
    {
        "you counted one way: the state is read, and written back after the update": 1.006,
        "you moved m and v, and the fp32 master weights are optimizer state too": 1.339,
        "you moved the state of all ranks, and a rank updates its own shard": 8.036,
        "you moved 16 bytes a parameter, and parameters and gradients stay on the device": 2.679,
    },
    "MB",
    why="KΨ/N comes in for the update, and goes out again.",
)
SCRATCH = Prediction(
    {
        "you counted one reduction, and a second one is in flight": 0.049152,
        "you counted this rank, too, whose own shard needs no scratch": 0.131072,
        "you counted one other rank, and there are three": 0.032768,
        "you counted one bucket": 0.016384,
        "you counted shards, and a bucket is smaller": 0.299904,
    },
    "MB",
    why="(1 + 1) reductions × (4 − 1) other ranks × 16,384 bytes.",
)
FIRST_FIT = Prediction(
    {
        "you added up what lives at once, as though free memory were in one piece": 9,
        "you did not join the part that the second block left with the free end of the arena": 16,
        "you gave each tensor addresses of its own, and freed ones are used again": 24,
    },
    "MB",
    tolerance=0.001,
    why="The first checkpoint stays at 4, so the 6 MB lie above it, from 5 to 11.",
)
C4 = Prediction(
    {
        "you took stage 1, which is C2": 82.1,
        "you took whole checkpoints, which is C3": 50.07,
        "you took checkpoints that are moved away, which is C5": 154.4,
    },
    "billion parameters",
    tolerance=0.03,
    why="A block takes 128.8 MB of states and 16.8 MB of checkpoints on a GPU, so 169.6 blocks fit.",
)
SAME_CHECKPOINTS = Prediction(
    {
        "you divided by four, and each rank computes four times as many sequences, too": 0.25,
        "you counted four times as many sequences, and P_a divides by four": 4,
        "you multiplied twice": 16,
    },
    "times",
    why="b/4 sequences of width h, or a quarter of b of them: both are b·s·h/4 for a block.",
)
QUESTIONS = (
    Quiz(
        "Eight GPUs train with data parallelism alone. The activation checkpoints do not fit. Does P_a help?",
        "c",
        {
            "a": Choice(
                "Yes: each GPU keeps an eighth.",
                "An eighth of what? Each GPU computes other sequences, so no input is there twice.",
            ),
            "b": Choice(
                "Yes, if ZeRO is at stage 3.",
                "Stage 3 divides parameters. The inputs of blocks are this GPU's own, at every stage.",
            ),
            "c": Choice(
                "No. A smaller micro-batch helps, and so does moving checkpoints to host memory.",
                "P_a removes copies of one input. With data parallelism alone there are none.",
            ),
        },
    ),
    Quiz(
        "A block sends 10·b·s·h with checkpointing here, and 12·b·s·h in the paper. Which of the two "
        "computes wrong gradients?",
        "b",
        {
            "a": Choice(
                "The one with 10: an all-reduce is missing.",
                "What it would add up is the block's output, and backward does not need it.",
            ),
            "b": Choice(
                "Neither.",
                "The block's output is not needed to compute its gradients. PyTorch stops before it, and the "
                "paper computes it and throws it away.",
            ),
            "c": Choice(
                "The one with 12: gradients are added up twice.",
                "The repeated all-reduce is forward's g. It adds up outputs, not gradients.",
            ),
        },
    ),
    Quiz(
        "You set `bucket_bytes` to a tenth of a shard. What changes?",
        "a",
        {
            "a": Choice(
                "The scratch of a reduction, and its time.",
                "It receives a shard in ten rounds, in the same scratch. The sum has the same terms in the "
                "same order.",
            ),
            "b": Choice(
                "The bytes that are sent: ten messages cost more than one.",
                "Ten tenths are one shard. Each message has a latency, so it takes longer.",
            ),
            "c": Choice(
                "The last bits, because sums are rounded in parts.",
                "Each element is summed over the ranks in rank order, in whichever message it arrives.",
            ),
        },
    ),
    Quiz(
        "An all-reduce of b·s·h takes 4 ms within a machine and 40 ms between machines. A copy has 8 GPUs, "
        "and a machine has 8 GPUs. Where do the GPUs of a copy belong?",
        "b",
        {
            "a": Choice(
                "In eight machines, so that each uses its own network card.",
                "Then four all-reduces or more in each block take 40 ms, and the block waits for each.",
            ),
            "b": Choice(
                "In one machine.",
                "Every block waits for its all-reduces. ZeRO's messages go between machines, and those can "
                "overlap with computation.",
            ),
            "c": Choice(
                "Anywhere: the bytes are the same.",
                "The bytes are, and the links are not.",
            ),
        },
    ),
    Quiz(
        "A model fits at stage 3 on 64 GPUs, one copy on each. When is it still worth while to share a copy "
        "among 8 GPUs?",
        "c",
        {
            "a": Choice(
                "Never: stage 3 divides all states by 64 already.",
                "It divides states. 64 copies also need 64 micro-batches, and that may be too large a batch.",
            ),
            "b": Choice(
                "When the checkpoints are too large at the same global batch: P_a divides them by 8.",
                "Each copy then has 8 times as many sequences, so each GPU keeps as many bytes as before.",
            ),
            "c": Choice(
                "When 64 copies make the global batch too large, or the network between machines is slow.",
                "8 copies can have an eighth of the batch, and most bytes stay within a machine.",
            ),
        },
    ),
)
