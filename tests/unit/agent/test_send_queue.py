import threading
from collections.abc import Sequence

from pdd.agent.send_queue import Piece, SendQueue, Urgency
from pdd.policy.wan_order import NextTransfer, WaitingTransfer

PLAIN = Urgency()


def pieces(number: int, *indices: int, length: int = 10) -> list[Piece]:
    return [Piece(number=number, key=b"k", index=i, offset=0, length=length) for i in indices]


def taken(queue: SendQueue, max_bytes: int = 10) -> list[tuple[int, int]]:
    return [(piece.number, piece.index) for piece in queue.take(max_bytes)]


def test_the_shorter_transfer_goes_first_whatever_was_queued_first() -> None:
    queue = SendQueue()
    queue.put(pieces(5, 0, 1), rank=1, urgency=PLAIN)
    queue.put(pieces(9, 0), rank=2, urgency=PLAIN)
    assert [taken(queue) for _ in range(3)] == [[(9, 0)], [(5, 0)], [(5, 1)]]


def test_who_began_first_goes_first_among_equals() -> None:
    queue = SendQueue(clock=lambda: 0.0)
    queue.put(pieces(5, 0), rank=2, urgency=PLAIN)
    queue.put(pieces(9, 0), rank=1, urgency=PLAIN)
    assert [taken(queue) for _ in range(2)] == [[(9, 0)], [(5, 0)]]


def test_unmasked_before_masked_before_outliers() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0), rank=1, urgency=Urgency(priority=-1))
    queue.put(pieces(2, 0), rank=2, urgency=PLAIN)
    queue.put(pieces(3, 0, 1), rank=3, urgency=Urgency(is_unmasked=True))
    assert taken(queue, 100) == [(3, 0), (3, 1), (2, 0), (1, 0)]


def test_waiting_counts_by_the_clock() -> None:
    now_s = 0.0
    queue = SendQueue(clock=lambda: now_s)
    queue.put(pieces(1, 0), rank=1, urgency=Urgency(priority=-1))
    now_s = 100.0
    queue.put(pieces(2, 0), rank=2, urgency=Urgency(is_unmasked=True))
    assert taken(queue) == [(1, 0)]


def test_small_pieces_go_together_up_to_a_bound() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0, 1, 2, 3), rank=1, urgency=PLAIN)
    assert taken(queue, 30) == [(1, 0), (1, 1), (1, 2)]
    assert taken(queue, 5) == [(1, 3)]


def test_a_discarded_transfer_is_not_sent() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0), rank=1, urgency=PLAIN)
    queue.put(pieces(2, 0), rank=2, urgency=PLAIN)
    queue.discard(1)
    queue.discard(7)
    assert taken(queue, 100) == [(2, 0)]


def test_a_closed_queue_gives_nothing() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0), rank=1, urgency=PLAIN)
    queue.close()
    assert taken(queue) == []


def test_another_order_can_take_its_place() -> None:
    seen: list[Sequence[WaitingTransfer]] = []

    def longest(waiting: Sequence[WaitingTransfer]) -> NextTransfer:
        seen.append(waiting)
        longest = max(waiting, key=lambda transfer: transfer.remaining_bytes)
        return NextTransfer(number=longest.number, reason="longest")

    queue = SendQueue(longest)
    queue.put(pieces(1, 0, 1, 2), rank=1, urgency=PLAIN)
    queue.put(pieces(2, 0), rank=2, urgency=PLAIN)
    assert taken(queue) == [(1, 0)]
    assert {transfer.remaining_bytes for transfer in seen[0]} == {30, 10}


def test_the_last_bytes_are_shared_by_all_takers() -> None:
    queue = SendQueue()
    queue.put([Piece(number=1, key=b"k", index=0, offset=0, length=2**20)], rank=0, urgency=PLAIN)
    taken = [piece for _ in range(4) for piece in queue.take(2**20, num_takers=4)]
    assert [piece.offset for piece in taken] == sorted(piece.offset for piece in taken)
    assert taken[0].length == 2**18
    rest = []
    while sum(piece.length for piece in taken + rest) < 2**20:
        rest += queue.take(2**20, num_takers=4)
    ends = [0]
    for piece in taken + rest:
        assert piece.offset == ends[-1]
        ends.append(piece.offset + piece.length)
    assert ends[-1] == 2**20


def test_long_queues_are_taken_in_whole_pieces() -> None:
    queue = SendQueue()
    queue.put(
        [Piece(number=1, key=b"k", index=i, offset=0, length=2**20) for i in range(8)], rank=0, urgency=PLAIN
    )
    assert queue.take(2**20, num_takers=4)[0].length == 2**20


def test_chunks_the_peer_declines_are_not_sent() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0, 1, 1, 2), rank=1, urgency=PLAIN)
    queue.discard_chunks(1, {1})
    queue.discard_chunks(7, {1})
    assert taken(queue, 100) == [(1, 0), (1, 2)]
    queue.put(pieces(1, 3), rank=1, urgency=PLAIN)
    queue.discard_chunks(1, {3})
    queue.put(pieces(2, 0), rank=2, urgency=PLAIN)
    assert taken(queue, 100) == [(2, 0)]


def test_who_has_waited_longest_takes_the_next_share() -> None:
    """One stream that is quick to come back must not take the shares of those that are still waking up."""
    queue = SendQueue()
    started = [threading.Event() for _ in range(3)]
    lengths: list[tuple[int, int]] = []

    def take(name: int) -> None:
        started[name].set()
        lengths.extend((name, piece.length) for piece in queue.take(2**20, num_takers=3))

    threads = [threading.Thread(target=take, args=(name,)) for name in range(3)]
    for name, thread in enumerate(threads):
        thread.start()
        started[name].wait()
        while queue.num_waiting <= name:
            pass
    queue.put([Piece(number=1, key=b"k", index=0, offset=0, length=3 * 2**17)], rank=0, urgency=PLAIN)
    for thread in threads:
        thread.join()
    assert sorted(lengths) == [(name, 2**17) for name in range(3)]
