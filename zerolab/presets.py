"""Models and machines by name, each with the source of its numbers.

A model's `psi` is an exact count if its source gives the architecture, and otherwise the round number of the
source. A machine's memory is the maker's round figure times 1e9. A driver may report a few per cent more, as
makers write GB for GiB, or less, as some of it is reserved.
"""

import difflib
from dataclasses import dataclass
from typing import TypeVar

_GPT2 = "Radford et al. 2019, GPT-2; parameters counted from the released architecture"
_GPT3 = "Brown et al. 2020 (arXiv:2005.14165), Table 2.1"
_LLAMA2 = "Touvron et al. 2023 (arXiv:2307.09288); parameters counted from the released architecture"
_ZERO = "ZeRO (arXiv:1910.02054), "
_TABLE_5, _TABLE_7 = _ZERO + "Table 5, as in zerolab.paper", _ZERO + "Table 7, as in zerolab.paper"


@dataclass(frozen=True)
class Model:
    """A model as the accounting sees it: how many parameters, and the shape that sets its activations.

    `layers`, `hidden`, `heads` and `seq` are None where the source gives a size and no architecture.
    `vocab` is how many symbols are embedded, and `tied` whether the output head is the embedding. The ZeRO
    paper gives neither: GPT-2's vocabulary and a head of its own, as the course's GPT has, are assumed.
    """

    name: str
    psi: float
    layers: int | None
    hidden: int | None
    heads: int | None
    seq: int | None
    source: str
    vocab: int = 50_257
    tied: bool = False

    @property
    def whole_psi(self) -> int:
        """Parameters of the embedding and the head, which zerolab's tensor parallelism leaves whole; or 0."""
        return 0 if self.hidden is None else self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Machine:
    """A GPU: its memory, and its fastest link to its neighbours, in bytes per second and one direction."""

    name: str
    memory_bytes: int
    link_bytes_per_second: int
    link: str
    source: str


MODELS = {
    model.name: model
    for model in (
        Model("gpt2", 124_439_808, 12, 768, 12, 1024, _GPT2, tied=True),
        Model("gpt2-medium", 354_823_168, 24, 1024, 16, 1024, _GPT2, tied=True),
        Model("gpt2-large", 774_030_080, 36, 1280, 20, 1024, _GPT2, tied=True),
        Model("gpt2-xl", 1_557_611_200, 48, 1600, 25, 1024, _GPT2, tied=True),
        Model("zero-1.5b", 1_500_000_000, 48, 1600, None, 1024, _ZERO + "§3: GPT-2 as the round 1.5B"),
        Model("zero-7.5b", 7_500_000_000, None, None, None, None, _ZERO + "Figure 1 and Table 1"),
        Model("zero-13b", 13_000_000_000, 62, 4096, 32, 1024, _ZERO + "§10.4, trained without MP"),
        Model("zero-40b", 40_000_000_000, 88, 6144, 32, 1024, _TABLE_5),
        Model("zero-50b", 50_000_000_000, 62, 8192, 32, 1024, _TABLE_7),
        Model("zero-60b", 60_000_000_000, 132, 6144, 32, 1024, _TABLE_5),
        Model("zero-80b", 80_000_000_000, 100, 8192, 64, 1024, _TABLE_5),
        Model("zero-100b", 100_000_000_000, 125, 8192, 64, 1024, _ZERO + "§10; the authors' run script"),
        Model("zero-120b", 120_000_000_000, 150, 8192, 64, 1024, _TABLE_5),
        Model("zero-128b", 128_000_000_000, None, None, None, None, _ZERO + "Table 1"),
        Model("zero-140b", 140_000_000_000, 175, 8192, 64, 1024, _TABLE_5),
        Model("zero-150b", 150_000_000_000, 187, 8192, 64, 1024, _TABLE_7),
        Model("zero-170b", 170_000_000_000, 212, 8192, 64, 1024, _ZERO + "§10.2, the largest it trained"),
        Model("zero-1t", 1_000_000_000_000, None, None, None, None, _ZERO + "Table 1"),
        Model("llama2-7b", 6_738_415_616, 32, 4096, 32, 4096, _LLAMA2, 32_000),
        Model("llama2-13b", 13_015_864_320, 40, 5120, 40, 4096, _LLAMA2, 32_000),
        Model("llama2-70b", 68_976_648_192, 80, 8192, 64, 4096, _LLAMA2, 32_000),
        Model("gpt3-175b", 175_000_000_000, 96, 12288, 96, 2048, _GPT3, tied=True),
    )
}

# Data sheets add up both directions of a link; a ring rank sends in one, so half of that is what counts.
MACHINES = {
    name: Machine(
        name=name,
        memory_bytes=memory_gb * 10**9,
        link_bytes_per_second=both_ways_gb * 10**9 // 2,
        link=link,
        source=f"NVIDIA {product} data sheet: {memory_gb} GB, {both_ways_gb} GB/s both ways",
    )
    for name, memory_gb, both_ways_gb, link, product in (
        ("T4", 16, 32, "PCIe 3.0 x16", "T4"),
        ("P100-16GB", 16, 32, "PCIe 3.0 x16", "P100 PCIe"),
        ("V100-16GB", 16, 300, "NVLink 2", "V100 SXM2"),
        ("V100-32GB", 32, 300, "NVLink 2", "V100 SXM2"),
        ("L4", 24, 64, "PCIe 4.0 x16", "L4"),
        ("A10", 24, 64, "PCIe 4.0 x16", "A10"),
        ("A100-40GB", 40, 600, "NVLink 3", "A100 SXM4"),
        ("A100-80GB", 80, 600, "NVLink 3", "A100 SXM4"),
        ("H100-80GB", 80, 900, "NVLink 4", "H100 SXM5"),
        ("H200-141GB", 141, 900, "NVLink 4", "H200 SXM5"),
    )
}


def model(name: str) -> Model:
    """Return the model of that name, or an error that lists the names nearest to it."""
    return _find("model", name, MODELS)


def machine(name: str) -> Machine:
    """Return the GPU of that name, or an error that lists the names nearest to it."""
    return _find("GPU", name, MACHINES)


Found = TypeVar("Found")


def _find(what: str, name: str, catalogue: dict[str, Found]) -> Found:
    """Look a name up, in any case; where only a part matches ("V100"), the error says what it could mean."""
    if not isinstance(name, str):
        raise TypeError(
            f"{what} is {name!r}, of type {type(name).__name__}; give one of {', '.join(catalogue)}"
        )
    spellings = {key.lower(): key for key in catalogue}
    wanted = name.strip().lower()
    if wanted in spellings:
        return catalogue[spellings[wanted]]
    holding_it = [key for key in spellings if wanted and wanted in key]
    near = holding_it or difflib.get_close_matches(wanted, spellings, n=4, cutoff=0.5)
    names = ", ".join(spellings[key] for key in near or spellings)
    raise ValueError(
        f"{what} {name!r} is not known; " + (f"near it: {names}" if near else f"choose from {names}")
    )
