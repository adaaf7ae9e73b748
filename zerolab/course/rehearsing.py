"""Show how far a rehearsal is: a line below the cell that counts the blocks of the model."""

from collections.abc import Callable

from IPython.display import display
from torch import nn

STEPS, PASSES = 2, 2  # `rehearse` takes two steps, each with a forward and a backward pass


def progress(title: str, model_fn: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """`model_fn` for `zerolab.rehearse`, whose model shows how many of its `blocks` have been computed.

    The line is replaced as the rehearsal goes on, so the cell needs the tag ``nbval-ignore-output``.
    """
    line = display(_words(title, 0), raw=True, display_id=True)
    done = 0

    def build() -> nn.Module:
        model = model_fn()
        blocks = list(model.get_submodule("blocks").children())
        every = STEPS * PASSES * len(blocks)

        def count(*_) -> None:
            nonlocal done
            done += 1
            percent = 100 * done // every
            if percent > 100 * (done - 1) // every:
                line.update(_words(title, percent), raw=True)

        def forward_done(_module: nn.Module, _inputs: tuple, output) -> None:
            count()
            output.register_hook(count)

        for block in blocks:
            block.register_forward_hook(forward_done)
        return model

    return build


def _words(title: str, percent: int) -> dict[str, str]:
    return {"text/plain": f"{title}: {percent} % of the blocks computed"}
