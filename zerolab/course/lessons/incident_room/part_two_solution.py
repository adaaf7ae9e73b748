"""Solutions of the exercises in lesson 09's second part."""

import torch

from zerolab import cost, memory
from zerolab.collectives import Work
from zerolab.stages.base import Stage


def my_test(train):
    ranks, micro_batches = 3, 2
    for stage in range(4):
        run = train(ranks, stage, steps=2, micro_batches=micro_batches, clip=0.1)
        right = memory.model_states(run.psi, ranks, stage, "fp32", k=4)
        volume = cost.communication_volume(run.psi, stage, micro_batches, reduce_each=True)
        for parameters, held, sent in zip(run.parameters, run.memory, run.sent, strict=True):
            assert torch.equal(parameters, run.alone)
            assert held.params_bytes == right.params_bytes
            assert held.grads_bytes == right.grads_bytes
            assert held.optimizer_bytes == right.optimizer_bytes
            assert sent == 4 * volume


class Stage0(Stage):
    """Every rank keeps everything and makes the whole update."""

    def setup(self, unit):
        unit.own(slice(0, unit.padded_numel))

    def unshard(self, unit):
        return Work()  # whole already: nothing to wait for

    def reshard(self, unit):
        pass

    def reduce_grads(self, unit):
        return self.comm.all_reduce(unit.grads.local, unit, unit.grads.op)

    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local[unit.owned])

    def update(self, units, step):
        for unit in units:
            step(unit)


class Stage1(Stage0):
    """A rank updates its part. The all-gather after the update is the second half of the all-reduce."""

    def setup(self, unit):
        unit.own(self.comm.shard_range(unit.padded_numel))

    def reduce_grads(self, unit):
        return self.comm.reduce_scatter(unit.grads.local, unit, unit.grads.op)

    def update(self, units, step):
        for unit in units:
            step(unit)
            unit.expect(self.comm.all_gather(unit.flat, unit).wait)


class Stage2(Stage1):
    """Of a gradient only the part lives on that the update reads. A view would keep all of it."""

    def after_reduce(self, unit):
        unit.grads.keep(unit.grads.local[unit.owned].clone())
        unit.grads.free_local()


class Stage3(Stage2):
    """Parameters are whole while their unit computes. So nothing is gathered after the update."""

    def setup(self, unit):
        super().setup(unit)
        unit.detach_shard()
        unit.free()

    def unshard(self, unit):
        unit.refill()
        return self.comm.all_gather(unit.flat, unit).then(unit.restore_parameters)

    def reshard(self, unit):
        unit.free()

    def update(self, units, step):
        for unit in units:
            step(unit)
