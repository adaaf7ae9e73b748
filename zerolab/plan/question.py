"""Question: what is to be trained, on what, and how; and what follows for memory, traffic and time."""

from dataclasses import dataclass, replace

from zerolab import cost, memory, presets, residual, step_time
from zerolab.plan.matrices import Matrices

STAGES = {0: "nothing", 1: "optimizer", 2: "+ gradients", 3: "+ parameters"}  # and what each one shards


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what, and how.

    Attributes:
        gpus: all of them. With tensor parallelism several share each copy of the model.
        batch: sequences of each copy and micro-batch.
        partition_activations, cpu_checkpointing: the paper's P_a, and its checkpoints in the host's memory.
        offload_optimizer: "cpu" or "disk", where the optimizer state is kept, if not on the GPU.
        links: what the GPUs compute and send, to estimate the seconds of a step.
        matrices: what ranks own whole, as for Muon; None where all parameters are cut.
    """

    model: presets.Model
    gpus: int
    gpu_memory_bytes: float
    precision: str
    k: float
    micro_batches: int
    batch: int
    seq: int
    checkpointing: bool
    tensor_parallel: int = 1
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    offload_optimizer: str | None = None
    links: step_time.Links | None = None
    matrices: Matrices | None = None

    @property
    def has_shape(self) -> bool:
        """Whether the model's layers are known, and with them its activations."""
        return self.model.layers is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and width. Ask `has_shape` first."""
        assert self.model.layers is not None and self.model.hidden is not None
        return self.model.layers, self.model.hidden

    @property
    def copies(self) -> int:
        """How many copies of the model there are, which is the number of data-parallel ranks."""
        return self.gpus // self.tensor_parallel

    @property
    def batch_of(self) -> str:
        """What computes a batch, in words."""
        return "GPU" if self.tensor_parallel == 1 else "copy"

    @property
    def rank_psi(self) -> float:
        """Parameters of one tensor-parallel rank, whose states the data-parallel ranks share."""
        return residual.rank_psi(self.model.psi, self.tensor_parallel, self.model.whole_psi)

    @property
    def element_bytes(self) -> int:
        """Of activations, and of messages with parameters."""
        return memory.CONVENTIONS[self.precision].params_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of an element in messages with gradients."""
        return memory.CONVENTIONS[self.precision].grads_bytes

    @property
    def keeps_each_block(self) -> bool:
        """Whether each block has a checkpoint, as in the paper, and not each segment of √L blocks."""
        return self.checkpointing and (self.tensor_parallel > 1 or self.cpu_checkpointing)

    @property
    def checkpoints(self) -> residual.Placement:
        """The checkpoints of all blocks, of one batch."""
        return residual.activation_checkpoints(
            *self.shape,
            self.batch,
            self.seq,
            self.tensor_parallel,
            self.partition_activations,
            self.cpu_checkpointing,
            bytes_per_element=self.element_bytes,
        )

    @property
    def block_bytes(self) -> int:
        """Activations of the one block that is computed again."""
        return residual.recomputed_block(self.shape[1], self.batch, self.seq, self.element_bytes)

    @property
    def activation_bytes(self) -> float:
        if not self.has_shape:
            return 0
        if self.keeps_each_block:
            return self.checkpoints.device_bytes + self.block_bytes
        tokens = (self.batch, self.seq)
        return memory.activations(
            *self.shape, *tokens, self.checkpointing, bytes_per_element=self.element_bytes
        )

    def placed_states(self, stage: int) -> tuple[memory.ModelStates, float]:
        """The model states on the GPU, and the bytes of the optimizer state that are kept elsewhere."""
        states = self._all_states(stage)
        return (states, 0) if self.offload_optimizer is None else residual.offload_optimizer(states)

    def _all_states(self, stage: int) -> memory.ModelStates:
        """The model states of a rank; of the rank that owns most, where matrices are whole."""
        how = (self.copies, stage, self.precision)
        if self.matrices is None:
            return memory.model_states(self.rank_psi, *how, self.k)
        share = self.matrices.largest_share(self.copies)
        whole = memory.model_states(self.matrices.psi, *how, self.matrices.k, own_share=share)
        # The matrices may have more parameters than the model's name says, which is rounded.
        return whole + memory.model_states(max(0, self.rank_psi - self.matrices.psi), *how, self.k)

    @property
    def device_k(self) -> float:
        """Bytes of optimizer state that a parameter costs on the GPU, in the mean over the model."""
        if self.offload_optimizer is not None:
            return 0
        if self.matrices is None:
            return self.k
        return self.k + (self.matrices.k - self.k) * self.matrices.psi / self.rank_psi

    def states(self, stage: int) -> memory.ModelStates:
        return self.placed_states(stage)[0]

    def total_bytes(self, stage: int) -> float:
        return self.states(stage).total_bytes + self.activation_bytes

    def whole_unit_bytes(self, stage: int) -> float:
        """An estimate of what stages 2 and 3 have whole at a time: the root unit and two blocks.

        From stage 2 on these are their gradients, and at stage 3 their parameters too. A prefetch, or a
        reduction in flight, is the second block.
        """
        whole_psi = self.model.whole_psi
        block_psi = max(0, self.rank_psi - whole_psi) / self.shape[0]
        widths = self.gradient_bytes * (stage >= 2) + self.element_bytes * (stage == 3)
        return widths * (whole_psi + 2 * block_psi)

    def spare_bytes(self, stage: int) -> float:
        """Memory left over; below 0 it is what is missing."""
        return self.gpu_memory_bytes - self.total_bytes(stage)

    def fits(self, stage: int) -> bool:
        return self.spare_bytes(stage) >= 0

    def smallest_stage(self) -> int | None:
        return next(filter(self.fits, STAGES), None)

    def largest_batch(self, stage: int) -> int:
        room = self.gpu_memory_bytes - self.states(stage).total_bytes
        return max(0, int(room // replace(self, batch=1).activation_bytes))

    def largest_model(self, stage: int) -> float:
        """The most parameters whose states fit, of a model with as large an embedding."""
        how = (self.copies, stage, self.precision, self.device_k)
        rank_psi = memory.largest_model(self.gpu_memory_bytes, *how)
        return residual.largest_psi(rank_psi, self.tensor_parallel, self.model.whole_psi)

    def gpus_needed(self, stage: int) -> int | None:
        room = max(0, self.gpu_memory_bytes - self.activation_bytes)
        copies = memory.smallest_world_size(self.rank_psi, room, stage, self.precision, self.device_k)
        if copies is None:
            return None
        matrices = self.matrices.sizes if self.matrices is not None else []
        # More ranks than matrices share no more of them; and bytes are rounded, so it may take one more.
        most = max(copies + 1, len(matrices))
        tried = (n * self.tensor_parallel for n in range(copies, most + 1))
        return next((gpus for gpus in tried if replace(self, gpus=gpus).fits(stage)), None)

    def sent_bytes(self, stage: int) -> float:
        widths = (self.element_bytes, self.gradient_bytes)
        payload = cost.unit_bytes(self.rank_psi, stage, *widths, micro_batches=self.micro_batches)
        # each pass sends (N-1)/N of it, either kind
        return cost.wire_bytes(payload, self.copies, "all_gather")

    @property
    def gathered_once_bytes(self) -> float:
        """What a rank need not send at stage 3, as the embedding and the head stay whole until backward."""
        payload = self.micro_batches * self.model.whole_psi * self.element_bytes
        return cost.wire_bytes(payload, self.copies, "all_gather")

    @property
    def recomputed_all_reduces(self) -> int:
        """One of a block's two, as torch stops before the second. The paper repeats both."""
        return 1 if self.checkpointing else 0

    @property
    def tensor_parallel_sent_bytes(self) -> float:
        """What a rank sends in a step to those that share its copy."""
        sizes = (*self.shape, self.batch, self.seq)
        volume = cost.tensor_parallel_volume(*sizes, self.recomputed_all_reduces, self.partition_activations)
        payload = self.micro_batches * volume * self.element_bytes
        return cost.wire_bytes(payload, self.tensor_parallel, "all_gather")  # as above

    def moved_bytes(self, stage: int) -> float:
        """What is moved out of the GPU in a step, and in again."""
        checkpoints = self.checkpoints.outside_bytes if self.cpu_checkpointing else 0
        return self.placed_states(stage)[1] + self.micro_batches * checkpoints

    def time(self, stage: int) -> step_time.StepTime:
        """Seconds of a step. Ask for `links` first."""
        assert self.links is not None
        tokens = self.micro_batches * self.batch * self.seq
        flops = step_time.training_flops(self.rank_psi, tokens, self.checkpointing)
        link = (self.links.latency_seconds, self.links.data_parallel, self.element_bytes)
        units = self.shape[0] if self.has_shape else 1
        return step_time.StepTime(
            flops=flops,
            computation=step_time.computation_seconds(flops, self.links),
            data_parallel=cost.communication_seconds(
                self.rank_psi, stage, self.copies, *link, self.micro_batches, units, self.gradient_bytes
            ),
            tensor_parallel=self._tensor_parallel_seconds(self.links) if self.tensor_parallel > 1 else 0,
            offload=step_time.offload_seconds(self.moved_bytes(stage), self.links),
        )

    def _tensor_parallel_seconds(self, links: step_time.Links) -> float:
        layers, hidden = self.shape
        message_bytes = self.batch * self.seq * hidden * self.element_bytes
        how = (self.recomputed_all_reduces, self.partition_activations)
        of_a_pass = step_time.tensor_parallel_seconds(
            layers, message_bytes, self.tensor_parallel, links, *how
        )
        return self.micro_batches * of_a_pass
