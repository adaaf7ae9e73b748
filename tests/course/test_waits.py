"""Promise: a deadlock's report says who waits for whom, and gives no advice that the calls contradict."""

import pytest

from zerolab.course.messages import RETURNED, Message, Place
from zerolab.course.peers import to_nobody
from zerolab.course.waits import unmatched


def notes(*ranks: str) -> list[list]:
    """By rank: "s1" sends to rank 1, "r1" receives from it, "r?" from any, "b" is a barrier, "." its end.

    A capital letter starts a message and gives a handle. "s1#7" has the tag 7.
    """
    return [[_note(word, number + 1) for number, word in enumerate(own.split())] for own in ranks]


def _note(word: str, line: int) -> Message | str:
    if word == ".":
        return RETURNED
    word, _, tag = word.partition("#")
    op = {"s": "send", "r": "recv_", "b": "barrier", "a": "allreduce_"}[word[0].lower()]
    op = "recv_any_source_" if word == "r?" else op
    peer = int(word[1:]) if word[1:] not in ("", "?") else None
    call = {"b": "dist.barrier", "a": "dist.all_reduce"}.get(word[0], "")
    place = Place("answer.py", line, "f")
    return Message(op, peer, 3, 12, None, call, place, word[0].isupper(), tag=int(tag or 0))


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (("s1", "s2", "s0"), "all 3 ranks wait for each other, because all of them send first: rank 0 waits"),
        (("r2", "r0", "r1"), "because all of them receive first: rank 0 waits for a message from rank 2, "),
        (("r2", "r0", "r1"), "One of them has to send first. Or start both messages with dist.batch_"),
        (
            ("r1", "r0", "r0"),
            "from rank 1, and rank 1 waits for a message from rank 0. One of them has to send",
        ),
        (
            ("s1 r1 s2", "r0 s0 r2", "s0"),
            "its message, and rank 2 waits until rank 0 receives its message. One",
        ),
        (("s1 r1 s2", "r0 s0 r2", "s0"), "One of them has to receive first"),
        (("s1", "b", "b"), "until rank 1 receives its message, and rank 1 waits, too, in dist.barrier"),
        (("s1 b", "r0 ."), "rank 0 waits in dist.barrier, its barrier number 1, and rank 1 makes only 0 and"),
        (("s1", "."), "until rank 1 receives its message, and rank 1 has returned without a call (line"),
        (
            ("s1 .", "r0 r0"),
            "never sent (it sent 1): rank 0 has returned, after 1 send and no receive (line 2",
        ),
        (("r1", "r2 s2 .", "s1 r1 ."), "was never sent: rank 1 has returned (line 1"),
        (
            ("S1#0 r2#0", "S2#1 r0#1", "S0#2 r1#2"),
            "rank 0 receives with tag 0 from rank 2, which sent with tag 2: a receive takes a message of its",
        ),
        (("s1#3 r1", "r0#3 r0#3", "b"), "rank 0 waits for a message from rank 1, and rank 1 waits for a"),
        (("s0 ",), "with itself: its own tensor is there already. A ring of N ranks needs N-1 rounds"),
        (("s1 .", "r? r?"), "waits for message number 2 from any rank, and only 1 was sent to it"),
        (
            ("s1 r1 .", "s0 r0", "s1"),
            "the ranks are counted modulo 2, or it looks so: rank 0 sends to rank 1,",
        ),
        (("s1 r1 .", "r0 s0 .", "r1"), "rank 2 receives from rank 1. Nobody sends to rank 2. Count modulo"),
        (("S1 R2", "S2 R2", "S0 R1"), "rank 1 waits for a message from rank 2 that was never sent"),
        (("r1", "b", "s0"), "rank 0 waits for a message from rank 1 that was never sent: rank 1 waits, too"),
        (
            ("s1 r1 .", "r0 s0 .", "r0"),
            "That is an exchange of two ranks, and here are 3: find peers for any",
        ),
        (("r1 s1 .", "s0 r0 .", "s0 r0", "s0 r0"), "Ranks 0 and 1 send to each other and receive from each"),
        (("S1 R1", "S2 R2", "S0 R0"), "each rank sends to (rank + 1) % 3 and receives from (rank + 1) % 3"),
    ],
)
def test_who_waits_for_whom_is_said(ranks, says):
    assert says in unmatched(notes(*ranks))


@pytest.mark.parametrize(
    "ranks",
    [
        ("s1 r1 .", "r0 s0 r2", "r0"),  # rank 1 has another peer
        ("s1 r1 .", "r0 s0", "r1"),  # rank 1 waits, and has not come to rank 2
        ("s1 .", "r0 .", "r0"),  # one way alone
        ("s1 r1 .", "r0 r0"),
    ],
)
def test_an_exchange_of_two_ranks_is_seen_in_both_directions_alone(ranks):
    assert "two ranks" not in (unmatched(notes(*ranks)) or "")


@pytest.mark.parametrize("ranks", [("s1", "s2", "s0"), ("r1", "r0", "r0"), ("s1 r1 s2", "r0 s0 r2", "s0")])
def test_nobody_is_told_to_do_what_it_does(ranks):
    said = unmatched(notes(*ranks))
    first = "send" if "until" in said else "receive"
    assert f"has to {first} first" not in said and "second" not in said


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (("s1", "s2", "s3"), "count modulo the number of ranks, (rank + 1) % world_size"),
        (("r-1", "r0", "r1"), "rank 0 receives from rank -1, and the ranks are 0 to 2 (line 1 of f): count"),
        (
            ("s1 r1", "r0 s0", "s3"),
            "Ranks 0 and 1 exchange messages as a pair, and with 3 ranks rank 2 has no",
        ),
        (
            ("s1 r1 s2", "r0 s0 s3", "s3"),  # rank 0 sends to rank 2, which does not answer
            "Ranks exchange messages as a pair, with rank ^ 1 and rank ^ 2, and with 3 ranks rank 1 has no",
        ),
        (("s1 r1", "r0 s0", "r-1"), "find peers for any number of ranks"),
        (("", "", "s3"), "% world_size. If ranks are taken in pairs here, this one has no partner"),
        (
            ("s1 r3", "s2 r0", "s3 r1"),
            "The ranks are counted modulo 4, or it looks so. Count modulo world_size, which is 3",
        ),
        (("S1 R3", "S2 R0", "S3 R1"), "The ranks are counted modulo 4, or it looks so"),
        (("s1", "s5", "s0"), "rank 1 sends to rank 5, and the ranks are 0 to 2 (line 1 of f)"),
    ],
)
def test_a_rank_that_does_not_exist_is_explained_by_the_other_ranks(ranks, says):
    assert says in to_nobody([[note for note in own if note != RETURNED] for own in notes(*ranks)])


def test_a_rank_of_a_pair_is_not_told_that_it_has_no_partner():
    assert "partner" not in to_nobody(notes("s1", "s2 r2", "r1 s1 s4"))
    assert "pair" not in to_nobody(notes("s1 r3", "s2 r0", "s0 r1"))  # of a ring, each with two others


def test_a_pair_is_not_told_to_count_modulo():
    for last in ("s3", "r-1"):
        assert "modulo" not in to_nobody(notes("s1 r1", "r0 s0", last))
