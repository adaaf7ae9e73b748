"""Load real text that every machine has: the source of Python's own standard library.

The course should not need a download, and a model cannot learn random tokens. This text is a few megabytes,
and every machine that can run the course has it. It differs a little
between Python versions, so losses do too; within one installation everything here is deterministic.

Both data sets answer `batch(step, rank)` from their seed alone, with no state and no communication. A single
process can therefore rebuild the micro-batch that any rank saw, which the parity checks use.
"""

import functools
import math
import random
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Large, hand-written modules of the standard library. A distribution may leave some out; those are skipped.
SOURCES = """
    _pydecimal argparse ast bdb calendar cmd codecs configparser contextlib copy csv dataclasses
    datetime difflib dis doctest enum fileinput fractions ftplib functools gettext glob heapq imaplib
    inspect ipaddress locale mailbox mimetypes netrc ntpath optparse os pdb pickle pickletools platform
    plistlib poplib posixpath pprint profile pydoc queue random sched selectors shelve shlex shutil
    smtplib socket socketserver ssl statistics string subprocess symtable tarfile tempfile textwrap
    threading timeit tokenize trace traceback types typing uuid warnings wave weakref webbrowser zipapp
"""

HELD_OUT_FRACTION = 0.1


@functools.cache
def text(max_bytes: int = 1_000_000) -> bytes:
    """Return the first `max_bytes` of the standard library's source, modules in a fixed alphabetical order.

    Read as bytes: a byte-level model needs no tokenizer, and no encoding can fail.

    Raises: ValueError for a size below 1; FileNotFoundError where the installation carries no source.
    """
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes!r} must be an integer of at least 1")
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / f"{name}.py" for name in SOURCES.split()]
    source = b"\n".join(path.read_bytes() for path in paths if path.is_file())
    if not source:
        raise FileNotFoundError(
            f"no source of the standard library in {library}: this Python is installed without "
            "it; use one from python.org, conda or a distribution"
        )
    return source[:max_bytes]


def split(source: bytes, held_out: float = HELD_OUT_FRACTION) -> tuple[bytes, bytes]:
    """Cut a text into its training part and its held-out tail.

    A contiguous tail, because held-out windows scattered through the text would share lines with training.

    Raises: ValueError for a fraction that leaves either part empty.
    """
    cut = round(len(source) * (1 - held_out))
    if not 0 < cut < len(source):
        raise ValueError(f"held_out={held_out} of {len(source)} bytes leaves a part empty; try 0.1")
    return source[:cut], source[cut:]


def entropy(symbols: Iterable[int]) -> float:
    """Return the entropy in nats of how often each symbol occurs."""
    counts = Counter(symbols).values()
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts)


def unigram_entropy(source: bytes) -> float:
    """Return the loss in nats per byte of the best guess that ignores what came before.

    It is the bar a language model has to get under: a loss above it means nothing about order was learned.
    """
    return entropy(source)


class NextByte:
    """Windows of text and, for each byte, the byte after it: what a byte-level GPT trains on.

    Shapes: batch(step, rank) → (tokens, targets), each int64 [batch_size, context].
    Raises: ValueError for a text shorter than one window.
    """

    def __init__(self, source: bytes, context: int = 128, batch_size: int = 16, seed: int = 0):
        if len(source) <= context:
            raise ValueError(
                f"a text of {len(source)} bytes has no window of {context + 1}; give a longer text"
            )
        self.bytes = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self.context, self.batch_size, self.seed = context, batch_size, seed

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the micro-batch of `rank` at `step`: the same tensors whoever asks, and however often."""
        starts = _draw(self.seed, step, rank, len(self.bytes) - self.context, self.batch_size)
        windows = self.bytes[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def entropy(self) -> float:
        """Return the unigram entropy of the text: the loss of ignoring the context."""
        return entropy(self.bytes.tolist())


KINDS = (
    "lower case",
    "upper case",
    "digit",
    "space",
    "newline",
    "underscore",
    "opening bracket",
    "closing bracket",
    "quote",
    "other",
)
SYMBOLS = (*range(32, 127), ord("\n"), ord("\t"))  # printable ASCII and two more; any other byte is symbol 97
SYMBOL_COUNT = len(SYMBOLS) + 1
HISTORY = 8


def kind(byte: int) -> int:
    """Return the index in `KINDS` of one byte."""
    character = chr(byte)
    tests = (
        "a" <= character <= "z",
        "A" <= character <= "Z",
        "0" <= character <= "9",
        character == " ",
        character == "\n",
        character == "_",
        character in "([{",
        character in ")]}",
        character in "'\"",
        True,
    )
    return tests.index(True)


SYMBOL_OF_BYTE = torch.full((256,), SYMBOL_COUNT - 1)
SYMBOL_OF_BYTE[list(SYMBOLS)] = torch.arange(len(SYMBOLS))
KIND_OF_BYTE = torch.tensor([kind(byte) for byte in range(256)])


class NextKind:
    """Eight characters, one-hot, and the kind of the character after them: data for a softmax regression.

    Eight characters of 98 symbols make 784 features and the kinds make 10 classes, the sizes a reader may
    know from pictures of digits, without a download: is the next character a letter, a bracket, a new line?

    Shapes: batch(step, rank) → (features float32 [batch_size, 784], classes int64 [batch_size]).
    Raises: ValueError for a text of fewer than nine bytes.
    """

    features = HISTORY * SYMBOL_COUNT

    def __init__(self, source: bytes, batch_size: int = 256, seed: int = 0):
        if len(source) <= HISTORY:
            raise ValueError(f"a text of {len(source)} bytes has no example; give at least {HISTORY + 1}")
        self.bytes = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self.batch_size, self.seed = batch_size, seed

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the micro-batch of `rank` at `step`: the same tensors whoever asks, and however often."""
        starts = _draw(self.seed, step, rank, len(self.bytes) - HISTORY, self.batch_size)
        windows = self.bytes[starts[:, None] + torch.arange(HISTORY + 1)].long()
        symbols = SYMBOL_OF_BYTE[windows[:, :HISTORY]]
        return F.one_hot(symbols, SYMBOL_COUNT).flatten(1).float(), KIND_OF_BYTE[windows[:, HISTORY]]

    def entropy(self) -> float:
        """Return the entropy of the kinds: the loss of ignoring the eight characters."""
        return entropy(KIND_OF_BYTE[self.bytes.long()].tolist())


def training_and_held_out(context: int | None, batch_size: int, seed: int) -> list[NextByte] | list[NextKind]:
    """Return the data set over the training text and the one over the rest; bytes for a model with a context.

    A model without one gets the eight characters of a softmax regression.
    """
    parts = split(text())
    if context is None:
        return [NextKind(part, batch_size, seed) for part in parts]
    return [NextByte(part, context, batch_size, seed) for part in parts]


def _draw(seed: int, step: int, rank: int, bound: int, count: int) -> Tensor:
    """`count` positions below `bound`, a function of (seed, step, rank) alone, on every machine alike.

    The three numbers are hashed as text, so that neighbouring steps and ranks draw unrelated positions; sums
    such as seed + step + rank would give rank 1 at step 0 the batch of rank 0 at step 1.
    """
    generator = random.Random(f"seed {seed} step {step} rank {rank}")
    return torch.tensor(generator.choices(range(bound), k=count))
