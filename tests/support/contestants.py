"""The benchmark's contestants on a small model, and one of them replaced by something else."""

from zerolab import models
from zerolab.bench import contestants
from zerolab.bench.contestants import CONTESTANTS
from zerolab.bench.race import Settings

OTHERS = tuple(name for name in CONTESTANTS if name.startswith("deepspeed"))
HERE = tuple(name for name in CONTESTANTS if name not in OTHERS)
STAGES = ("zerolab-0", "zerolab-1", "zerolab-2", "zerolab-3")


def tiny() -> models.GPT:
    return models.GPT(width=32, depth=2, heads=2, context=32)


def settings(*names: str, build=tiny, **options) -> Settings:
    sizes = {"world_size": 2, "rounds": 2, "batch": 1, "threads": 1}
    return Settings(build, names, "fused", **sizes | options)


def spoiled(name: str, spoil) -> models.GPT:
    """A builder of the tiny model that first puts another contestant in a place, on the rank it runs on."""

    def build() -> models.GPT:
        contestants.CONTESTANTS[name] = spoil  # through the module, which a rank imports for itself
        return tiny()

    return build
