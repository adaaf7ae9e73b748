"""Lesson 06's exercise on prefetching: any right style passes, and each mistake is named."""

from collections import deque

import pytest
import torch.distributed as dist
from support.answers import alone, together
from support.lessons import solutions_travel_by_value

from zerolab.course.lessons.zero_stage_3 import check_prefetch

solutions_travel_by_value(__name__)


def use(layer, x):
    layer.wait()
    x = layer.forward(x)
    layer.free()
    return x


def after_each(layers, x, prefetch):
    """Right: prefetch + 1 gathers first, and one more whenever a layer is freed."""
    for layer in layers[: prefetch + 1]:
        layer.gather()
    for index, layer in enumerate(layers):
        x = use(layer, x)
        for following in layers[index + prefetch + 1 :][:1]:
            following.gather()
    return x


def with_a_queue(layers, x, prefetch):
    """Right: what is gathered waits in a queue of bounded length."""
    left, ahead = deque(layers), deque()
    while left or ahead:
        while left and len(ahead) <= prefetch:
            ahead.append(left.popleft())
            ahead[-1].gather()
        x = use(ahead.popleft(), x)
    return x


def recursive(layers, x, prefetch, begun=0):
    """Right: the rest of the layers are run by another call."""
    if not layers:
        return x
    for layer in layers[begun : prefetch + 1]:
        layer.gather()
    return recursive(layers[1:], use(layers[0], x), prefetch, max(min(prefetch + 1, len(layers)) - 1, 0))


def all_first(layers, x, prefetch):
    for layer in layers:
        layer.gather()
    for layer in layers:
        x = use(layer, x)
    return x


def just_in_time(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        x = use(layer, x)
    return x


def one_late(layers, x, prefetch):
    """The next gather begins only when the layer has computed."""
    layers[0].gather()
    for index, layer in enumerate(layers):
        layer.wait()
        x = layer.forward(x)
        for following in layers[index + 1 : index + 2]:
            following.gather()
        layer.free()
    return x


def one_more(layers, x, prefetch):
    return after_each(layers, x, prefetch + 1)


def always_one(layers, x, prefetch):
    return after_each(layers, x, 1)


def no_wait(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
    return x


def waits_at_once(layers, x, prefetch):
    for layer in layers[: prefetch + 1]:
        layer.gather()
        layer.wait()
    for index, layer in enumerate(layers):
        x = layer.forward(x)
        layer.free()
        for following in layers[index + prefetch + 1 :][:1]:
            following.gather()
            following.wait()
    return x


def no_free(layers, x, prefetch):
    for layer in layers[: prefetch + 1]:
        layer.gather()
    for index, layer in enumerate(layers):
        layer.wait()
        x = layer.forward(x)
        for following in layers[index + prefetch + 1 :][:1]:
            following.gather()
    return x


def last_not_freed(layers, x, prefetch):
    for layer in layers[: prefetch + 1]:
        layer.gather()
    for index, layer in enumerate(layers):
        layer.wait()
        x = layer.forward(x)
        if layer is not layers[-1]:
            layer.free()
        for following in layers[index + prefetch + 1 :][:1]:
            following.gather()
    return x


def warmed_up(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        layer.wait()
        layer.free()
    return after_each(layers, x, prefetch)


def beyond_the_end(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for index, layer in enumerate(layers):
        layers[index + prefetch].gather()
        x = use(layer, x)
    return x


def more_than_there_are(layers, x, prefetch):
    for number in range(prefetch + 1):
        layers[number].gather()
    for index, layer in enumerate(layers):
        x = use(layer, x)
        for following in layers[index + prefetch + 1 :][:1]:
            following.gather()
    return x


def pops_from_an_empty_queue(layers, x, prefetch):
    left = deque(layers)
    for layer in [left.popleft() for _ in range(prefetch)]:
        layer.gather()
    for layer in layers:
        if left:
            left.popleft().gather()
        x = use(layer, x)
    return x


def around(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for index, layer in enumerate(layers):
        layers[(index + prefetch) % len(layers)].gather()
        x = use(layer, x)
    return x


def freed_first(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        layer.wait()
        layer.free()
        x = layer.forward(x)
    return x


def nothing_returned(layers, x, prefetch):
    after_each(layers, x, prefetch)


def same_input(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        output = use(layer, x)
    return output


def backwards(layers, x, prefetch):
    return after_each(layers[::-1], x, prefetch)


def one_left_out(layers, x, prefetch):
    for layer in layers:
        layer.gather()
        layer.wait()
        x = layer.forward(x) if layer.index else x
        layer.free()
    return x


def all_outputs(layers, x, prefetch):
    outputs = []
    for layer in layers:
        layer.gather()
        outputs.append(use(layer, outputs[-1] if outputs else x))
    return outputs[0]


def first_twice(layers, x, prefetch):
    layers[0].gather()
    return after_each(layers, x, prefetch)


def another_order(layers, x, prefetch):
    """Rank 0 gathers the first two layers in another order: messages of one size, and no error of gloo's."""
    first = layers[:2] if dist.get_rank() else layers[1::-1]
    for layer in first:
        layer.gather()
    for layer in layers[2:]:
        layer.gather()
    for layer in layers:
        x = use(layer, x)
    return x


def waits_again(layers, x, prefetch):
    """Right: the first wait is enough, and a second one returns at once."""
    for layer in layers[:prefetch]:
        layer.gather()
    for index, layer in enumerate(layers):
        for following in layers[index + prefetch :][:1]:
            following.gather()
        layer.wait()
        x = use(layer, x)
    return x


def waits_for_all_there(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for index, layer in enumerate(layers):
        for following in layers[index + prefetch :][:1]:
            following.gather()
        for each in layers[index : index + prefetch + 1]:
            each.wait()
        x = layer.forward(x)
        layer.free()
    return x


def freed_one_late(layers, x, prefetch):
    for layer in layers[:prefetch]:
        layer.gather()
    for index, layer in enumerate(layers):
        for following in layers[index + prefetch :][:1]:
            following.gather()
        layer.wait()
        x = layer.forward(x)
        if index:
            layers[index - 1].free()
    layers[-1].free()
    return x


def freed_at_the_end(layers, x, prefetch):
    x = no_free(layers, x, prefetch)
    for layer in layers:
        layer.free()
    return x


def freed_after_the_gather(layers, x, prefetch):
    for layer in layers[: prefetch + 1]:
        layer.gather()
    for index, layer in enumerate(layers):
        layer.wait()
        x = layer.forward(x)
        for following in layers[index + prefetch + 1 :][:1]:
            following.gather()
        layer.free()
    return x


def freed_twice(layers, x, prefetch):
    layers[0].gather()
    x = use(layers[0], x)
    layers[0].free()


def every_output(layers, x, prefetch):
    outputs = [x]
    for layer in layers:
        layer.gather()
        outputs.append(use(layer, outputs[-1]))
    return outputs


def last_ones_input(layers, x, prefetch):
    """Rank 1 returns what goes into its last layer."""
    inputs = [x]
    for layer in layers:
        layer.gather()
        inputs.append(use(layer, inputs[-1]))
    return inputs[-1 - dist.get_rank()]


RIGHT = [after_each, with_a_queue, recursive, waits_again]
WRONG = [
    (waits_for_all_there, "For silver: rank 0 waits for layer 1 before layer 0 computes"),
    (
        freed_one_late,
        "layer 0 has computed, and it is freed only after the forward of layer 1. Free each layer right",
    ),
    (freed_at_the_end, "layer 0 has computed, and it is freed only after the forward of layer 3"),
    (freed_after_the_gather, "layer 0 has computed, and it is freed only after the gather of layer 2"),
    (one_more, "the gather of layer 2 begins before layer 0 has computed and was freed"),
    (freed_twice, "layer 0 is freed, and it is not there: it was freed before"),
    (every_output, "it returned list, and every layer computed as it should: return what the last layer's"),
    (last_ones_input, "rank 1 is not: every layer computed as it should: return what the last layer's"),
    (lambda layers, x, prefetch: None, "not written yet"),
    (all_first, "the layers [0, 1, 2, 3] are there at once, 4 of them, and prefetch=1 allows 2"),
    (just_in_time, "For silver: on rank 0 the gather of layer 1 has not begun when layer 0 computes"),
    (one_late, "the gather of layer 1 has not begun when layer 0 computes"),
    (one_more, "For gold: on rank 0 the layers [0, 1, 2] are there at once, 3 of them"),
    (always_one, "For silver: on rank 0 the gather of layer 2 has not begun when layer 0 computes"),
    (no_wait, "layer 0 computes, and its gather may not be over: call wait() first"),
    (waits_at_once, "rank 0 waits for layer 1 before layer 0 computes, so sending and computing take turns"),
    (no_free, "rank 0 frees no layer"),
    (last_not_freed, "the layers [3] are still there at the end"),
    (warmed_up, "rank 0 gathers layer 0 2 times"),
    (beyond_the_end, "There are 4 layers, and near the end fewer than prefetch are left to gather"),
    (more_than_there_are, "list index out of range, before layer 0 computes (line "),
    (more_than_there_are, "There are 4 layers, and prefetch is 6: at the start begin no more gathers"),
    (pops_from_an_empty_queue, "There are 4 layers, and prefetch is 6: at the start begin no more gathers"),
    (alone(around), "gathers layer 0 2 times"),
    (freed_first, "layer 0 computes, and its weight was freed before: free a layer after its forward"),
    (nothing_returned, "it returned None"),
    (same_input, "layer 1's forward got something other than what layer 0's forward returned"),
    (backwards, "forward ran the layers [3, 2, 1, 0]: it goes through [0, 1, 2, 3]"),
    (one_left_out, "forward ran the layers [1, 2, 3]"),
    (all_outputs, "return what the last layer's forward returned"),
    (first_twice, "layer 0 is gathered a second time while it is there"),
    (another_order, "begin their gathers in different orders"),
]  # fmt: skip
diagnose = together(check_prefetch, [*RIGHT, *(wrong for wrong, _ in WRONG)])


@pytest.mark.parametrize("right", RIGHT)
def test_every_right_way_passes(right):
    assert diagnose(right) is None


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_the_check_names_the_mistake(wrong, words):
    assert words in diagnose(wrong)
