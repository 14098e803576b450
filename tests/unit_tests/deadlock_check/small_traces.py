"""Traces that are small enough to know what must be said of them."""

from tools.deadlock_check.machine import Machine
from tools.deadlock_check.trace import Batch, Compute, Group, Place, Trace, Transfer, Wait

ONE_BY_ONE = Machine("one by one", coalesces=False)
BATCHES = Machine("batches")


def meeting_of_two_stages(stage_ranks=(0, 1)):
    """Both stages send before they receive, in the middle of a step."""
    first, second = stage_ranks
    forward, backward = (
        Place("steady", 3, 1, "schedules.py:11 forward"),
        Place("cooldown", 2, 0, "schedules.py:22 backward"),
    )
    programs = {
        first: _stage(second, "send_next", forward, "recv_next", backward),
        second: _stage(first, "send_prev", backward, "recv_prev", forward),
    }
    return Trace(
        {"P": Group("P", tuple(sorted(stage_ranks)))},
        [programs[rank] for rank in sorted(programs)],
        "two stages meet",
    )


def _stage(peer, send_role, sent, receive_role, received):
    send = Transfer(True, "P", peer, 24, send_role, "shape", None, 1, sent)
    receive = Transfer(False, "P", peer, 24, receive_role, "shape", None, 2, received)
    return [
        Compute("forward", sent),
        Batch("P", [send, receive], sent),
        Wait((1, 2), False, sent),
        Compute("backward", received),
    ]


def ring(size):
    """Every rank sends to the next one before it receives from the previous one."""
    programs = [
        [
            Transfer(True, "W", (rank + 1) % size, 8, request=1),
            Transfer(False, "W", (rank - 1) % size, 8, request=2),
            Wait((1, 2)),
        ]
        for rank in range(size)
    ]
    return Trace({"W": Group("W", tuple(range(size)))}, programs, f"ring of {size}")
