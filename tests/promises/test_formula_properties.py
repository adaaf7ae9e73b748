"""Promise: the formulas of memory and cost fit together for any size, and a trace's totals are its events.

tests/promises/test_accounting.py holds each against the paper.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import always_the_same

from zerolab import cost, memory
from zerolab.trace import CONTROL, Trace

psis, sizes, stages = st.integers(0, 10**13), st.integers(1, 4096), st.sampled_from(range(4))
micro_batches = st.integers(1, 64)


@always_the_same
@given(psis, psis, sizes, sizes, st.sampled_from(sorted(memory.CONVENTIONS)), st.floats(0, 20))
def test_with_frozen_parameters_too_no_stage_and_no_rank_ever_adds_a_byte(psi, frozen, n, more, precision, k):
    states = lambda stage, ranks: memory.model_states(psi, ranks, stage, precision, k, frozen)
    for stage in range(4):
        found = states(stage, n)
        parts = (found.params_bytes, found.grads_bytes, found.optimizer_bytes)
        assert min(parts) >= 0 and found.total_bytes == sum(parts)
        assert states(stage, n + more).total_bytes <= found.total_bytes
        assert not stage or found.total_bytes <= states(stage - 1, n).total_bytes


@always_the_same
@given(st.lists(st.tuples(st.integers(0, 10**9), st.booleans()), max_size=9), stages)
def test_units_add_up_to_the_model(units, stage):
    """Kept whole, a unit saves a gather at stage 3; frozen ones move at stage 3 alone."""
    psi = sum(numel for numel, _ in units)
    moved = [cost.unit_bytes(numel, stage) for numel, _ in units]
    assert sum(moved) == 4 * cost.communication_volume(psi, stage)
    kept = [cost.unit_bytes(numel, stage, kept=is_kept) for numel, is_kept in units]
    saved = sum(numel for numel, is_kept in units if is_kept) if stage == 3 else 0
    assert sum(moved) - sum(kept) == 4 * saved
    frozen = [cost.unit_bytes(numel, stage, trainable=False) for numel, _ in units]
    assert sum(frozen) == (4 * 2 * psi if stage == 3 else 0)


@always_the_same
@given(psis, micro_batches, micro_batches)
def test_later_stages_and_more_micro_batches_never_move_less(psi, m, more):
    volumes = [cost.communication_volume(psi, stage, m) for stage in range(4)]
    assert volumes == sorted(volumes) and volumes[0] == volumes[1] == 2 * psi
    for stage in range(4):
        assert volumes[stage] <= cost.communication_volume(psi, stage, m + more)
        once = cost.communication_volume(psi, stage, m, reduce_each=False)
        assert once <= cost.communication_volume(psi, stage, m, reduce_each=True)


@always_the_same
@given(psis, sizes, sizes)
def test_on_the_wire_an_all_reduce_is_its_halves_and_nothing_is_sent_alone(payload, n, more):
    sent = {name: cost.wire_bytes(payload, n, name) for name in cost.COLLECTIVES}
    assert sent["all_reduce"] == sent["reduce_scatter"] + sent["all_gather"]
    for name in cost.COLLECTIVES:
        assert 0 <= sent[name] <= cost.wire_bytes(payload, n + more, name) <= 2 * payload
        assert cost.wire_bytes(payload, 1, name) == 0
        seconds = [cost.collective_seconds(payload, ranks, name, 1e-6, 1e9) for ranks in (n, n + more)]
        assert 0 <= seconds[0] <= seconds[1]


events = st.tuples(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "update", "exchange"]),
    st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 64), st.booleans(),
)  # fmt: skip


@always_the_same
@given(st.lists(st.lists(events, max_size=8), min_size=1, max_size=6), st.integers(1, 4))
def test_a_traces_totals_are_its_events(steps, keep):
    """By operation and in all, step by step; control messages apart; old steps are gone."""
    trace = Trace(keep_steps=keep)
    for step in steps:
        trace.next_step()
        for op, logical, wire, control, is_control in step:
            phase = CONTROL if is_control else None
            event = trace.begin(
                op, "unit", torch.empty(0), logical_bytes=logical, wire_bytes=wire, phase=phase
            )
            event.control_bytes = control
    for number, step in list(enumerate(steps))[-keep:]:
        found, moved = trace.traffic(number), [each for each in step if not each[-1]]
        assert found.logical_bytes == sum(logical for _, logical, *_ in moved)
        assert found.wire_bytes == sum(wire for _, _, wire, *_ in moved)
        controls = [wire if is_control else control for _, _, wire, control, is_control in step]
        assert found.control_bytes == sum(controls)
        for op in {op for op, *_ in moved} - {"update"}:
            assert found.by_op[op].wire_bytes == sum(wire for name, _, wire, *_ in moved if name == op)
        assert found.by_op.keys() == {op for op, *_ in moved} - {"update"}
    assert {event.step for event in trace.events} <= set(range(len(steps))[-keep - 1 :])
