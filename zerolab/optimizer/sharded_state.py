"""The state of a ZeroOptimizer that state_dict() and checkpoints read and write: this rank's shards."""

import dataclasses
import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import torch

from zerolab.engine.agreement import COPIES, LOADED, WRITTEN, agree_on, agree_on_all
from zerolab.engine.states import TrainingState
from zerolab.optimizer.base import OptimizerBase
from zerolab.optimizer.loads import Loads
from zerolab.optimizer.members import require_complete
from zerolab.optimizer.owners import Balance, balance_of
from zerolab.optimizer.settings import refuse_inference_mode
from zerolab.optimizer.shards import Shard, allocate_state, contents, describe_state, form, owned_shards
from zerolab.storages import digest
from zerolab.unit import FlatUnit, publish
from zerolab.unit.span import Span


class ShardedState(OptimizerBase):
    """The part of ZeroOptimizer that saves and restores: `state_dict`, and the interface of checkpoints."""

    def state_dict(self) -> dict:
        """This rank's shard of the optimizer state, tagged: it loads only where it belongs.

        Calls the state_dict hooks, as torch's own. Memory: none of its own; where state is offloaded, a copy.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.local.require_members(self.param_groups)
        self.local.hand_over(self.param_groups)  # what the user changed since the last step belongs to it
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        state_dict = self.local.state_dict() | {"zerolab": self._tag()} | scale
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a `state_dict` that was saved on the same rank, at the same stage, world size and layout.

        Every rank has to load. They compare that at the next update, and at stage 0 what they loaded. Calls
        the load_state_dict hooks, as torch's own.
        Raises: ValueError where its tag names another rank, world size, layout or optimizer.
        """
        refuse_inference_mode("load_state_dict()")
        state_dict = state_dict.copy()  # what a hook adds or removes is not the caller's
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if state_dict.get("zerolab") != self._tag():
            raise ValueError(
                f"this state_dict is the shard of {state_dict.get('zerolab', 'another optimizer')}, and this "
                f"is {self._tag()}: load it on the rank and with the layout and optimizer it was saved from. "
                "Accelerate's save_state() and the Trainer save rank 0's alone: save with zerolab.save(), "
                "which stores every rank's, and load with zerolab.load()"
            )
        if self.loss_scale is not None and "loss_scale" in state_dict:
            self.loss_scale.load_state_dict(state_dict["loss_scale"])
        ours = {key: value for key, value in state_dict.items() if key not in ("zerolab", "loss_scale")}
        self.local.load_state_dict(ours, self.param_groups)
        self._note_state()
        self._loads.note(self._owned_state())
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _owned_state(self) -> str:
        """What ranks compare of a state that they loaded: its hash, where each of them owns all of it.

        A rank may own a unit of whole parameters alone. So the units that may be cut anywhere decide.
        """
        evenly_cut = [unit for unit in self.units if unit.cuts is None]
        if not evenly_cut or any(unit.owned != slice(0, unit.padded_numel) for unit in evenly_cut):
            return "a part of a state"
        with closing(self.shards()) as shards:
            hashes = b"".join(digest(each.values) for each in shards if each.key)
        return f"a state with the hash {hashlib.blake2b(hashes, digest_size=16).hexdigest()}"

    def _tag(self) -> dict:
        layout = [(unit.name, unit.numel, unit.owned.start, unit.owned.stop) for unit in self.units]
        where = {"rank": self.rank, "world_size": self.world_size, "layout": layout}
        return where | {"optimizer": self.updates.names}

    @property
    def has_owners(self) -> bool:
        """Whether one rank alone has the optimizer's state of some parameters."""
        return any(unit.cuts is not None for unit in self.units)

    @property
    def balance(self) -> Balance | None:
        """How evenly the parameters are shared that one rank updates whole; None where there are none."""
        return balance_of(self.units, self.stage.comm.world_size)

    def require_idle(self, action: str) -> None:
        """Check that no forward or backward pass and no full_params() is open, the model and the groups.

        Collective: it also checks that every rank is about to do the same ``action``. Raises: RuntimeError.
        """
        self.engine.require_idle(action)
        self._slots.require_in_place()
        require_complete(self.model, self.units)
        self.local.require_members(self.param_groups)
        self.axes.everyone.check_same_collective(action)

    def saving(self) -> AbstractContextManager[None]:
        """Be in the state of a save: another thread that steps meanwhile raises an error."""
        return self.training.during(TrainingState.SAVE)

    def require_known_state(self) -> None:
        """Before a save, check that the class stores nothing of its own in its state_dict.

        Raises: ValueError where it does.
        """
        for each in self.local.optimizers:
            if type(each).state_dict is torch.optim.Optimizer.state_dict:
                continue
            if own := sorted(map(str, each.state_dict().keys() - {"state", "param_groups"})):
                raise ValueError(
                    f"{type(each).__name__}.state_dict() has {', '.join(own)} besides state and "
                    "param_groups, and a checkpoint would lose it: let the class keep it in its parameter "
                    "groups, or in the state of its parameters"
                )

    def require_one_state(self) -> None:
        """Before a save, check that ranks have parts of one state: that all of them loaded one, or none.

        And that all of them wrote the same values to parameters. The next step compares both again.
        With hybrid sharding, check also that all copies have the same values and optimizer state. Each rank
        stores a part of its own copy, so a checkpoint of copies that differ would be none of them.
        Collective. Raises: RuntimeError on every rank where they differ; after an update that failed.
        """
        self.training.require_whole_updates()
        agree_on_all(self.comm, {LOADED: self._loads.compare(), WRITTEN: self.engine.written_so_far()})
        if self.stage.copies is None:
            return
        with closing(self.shards()) as shards:
            lines = [
                f"{each.name} ({each.key or 'values'}) with the hash {digest(each.values).hex()}"
                for each in shards
            ]
        agree_on(self.stage.copies, COPIES, lines)

    def shards(self, disjoint: bool = False) -> Generator[Shard, None, None]:
        """This rank's slice of every parameter and of every tensor in the optimizer's state.

        ``disjoint``: only 1/N of what all ranks own, as at stage 0, so that each element is on one rank.
        What is offloaded comes back for a while: use the values of one shard before you take the next.
        Memory: where it is offloaded, what is updated together.
        """
        for units, slices in self.local.by_units(self.units):
            with self.offload.resident(units):
                yield from self._shards(owned_shards(units, slices, self.local.state, contents), disjoint)

    def shard_forms(self) -> Iterator[Shard]:
        """`shards` without their values, which nothing has to be read for."""
        return self._shards(owned_shards(self.units, self.slices, self.local.state, form), disjoint=False)

    def _shards(self, owned: Iterator[tuple[FlatUnit, Span, Shard]], disjoint: bool) -> Iterator[Shard]:
        for unit, span, shard in owned:
            if disjoint and not self.axes.counts(span.parameter):
                continue
            share = self.stage.share(unit) if disjoint else unit.owned
            if unit.cuts is None:
                own = shard.within(share.start - span.offset, share.stop - span.offset)
            else:  # all or nothing, and state may have other numbers of elements
                own = shard if share.start <= span.offset < share.stop else shard.within(0, 0)
            yield dataclasses.replace(own, part=self.axes.part(span.parameter))

    def describe_state(self) -> dict[str, dict]:
        """The optimizer state of this rank by parameter name and key, without the contents of its tensors.

        Raises: ValueError for state that cannot be stored by element.
        """
        return describe_state(self.slices, self.local.state)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """What `replace` and `replace_settings` change inside the with block is whole when it ends.

        After an exception inside, steps, saves and exports are refused until a load has ended.
        Raises: RuntimeError inside torch.inference_mode().
        """
        refuse_inference_mode("load()")
        with self.training.changing("load()"):
            yield
        self.training.broken_off = ""

    @torch.no_grad()
    def replace(self, state: dict[str, dict], write: Callable[[Iterator[Shard]], None]) -> None:
        """Allocate the optimizer ``state`` as described, and let ``write`` overwrite this rank's `shards`.

        The new values are shared as the stage shares an update, and gradients are cleared. Collective.
        Args: state: as `describe_state` returns it. Comm: Ψ at stages 1 and 2, none at others.
        """
        self.zero_grad()
        self.engine.gatherer.reshard(self.units)
        self.local.hand_over(self.param_groups)
        present = self.local.state
        allocate = lambda each: allocate_state(each, present.get(each.tensor, {}), state)
        self.local.replace_state(self.local.settings_dict(), self.param_groups, allocate)
        self._note_state()
        with closing(self.shards()) as shards:
            write(shards)
        with self.training.during(TrainingState.LOAD):
            self.stage.update(self.units, self._publish)
        self.engine.finish_gathers()
        self._loads = Loads()  # all ranks have one state now, and the same values
        self.engine.forget_writes()
        self._next_step()

    def not_kept(self, state: dict[str, dict]) -> list[str]:
        """Return whose optimizer ``state`` this run drops: parameters frozen at construction keep none."""
        frozen = (span.name for unit in self.units if not unit.trainable for span in unit.spans)
        return [name for name in frozen if state.get(name)]

    def replace_settings(self, options: list[dict], loss_scale: dict | None) -> None:
        """Take over the ``options`` of each parameter group, and the loss scale. The state stays."""
        self.local.hand_over(self.param_groups)
        settings = self.local.settings_dict()
        pairs = zip(settings["param_groups"], options, strict=True)
        settings["param_groups"] = [group | theirs for group, theirs in pairs]
        present = self.local.state
        self.local.replace_state(settings, self.param_groups, lambda each: present.get(each.tensor))
        if self.loss_scale is not None and loss_scale is not None:
            self.loss_scale.load_state_dict(loss_scale)

    @torch.no_grad()
    def gather_params(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Call ``read`` with the whole parameters of each unit by name, in the dtype of updates.

        Collective. Memory: one unit whole, in fp32 also where the model keeps 16 bits. Comm: Ψ.
        """
        with self.training.during(TrainingState.EXPORT):
            for unit in self.units:
                with self.offload.masters([unit]):
                    values = unit.values()
                    flat = torch.zeros(unit.padded_numel, dtype=values.dtype, device=unit.device)
                    flat[unit.owned] = values
                self.stage.comm.all_gather(flat, unit).wait()
                read({s.name: self.axes.whole(s.parameter, s.view(flat)) for s in unit.spans})
                del flat  # before the next is allocated

    def _publish(self, unit: FlatUnit) -> None:
        with self.offload.masters([unit]):
            publish([unit])
        unit.mark_updated(set(unit.spans))
