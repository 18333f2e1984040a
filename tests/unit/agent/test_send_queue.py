from collections.abc import Sequence

from pdd.agent.send_queue import Piece, SendQueue, Waiting, first_come


def pieces(number: int, *indices: int, length: int = 10) -> list[Piece]:
    return [Piece(number=number, key=b"k", index=i, offset=0, length=length) for i in indices]


def taken(queue: SendQueue, max_bytes: int = 10) -> list[tuple[int, int]]:
    return [(piece.number, piece.index) for piece in queue.take(max_bytes)]


def test_the_transfer_that_began_first_goes_first_whatever_was_queued_first() -> None:
    queue = SendQueue()
    queue.put(pieces(5, 0, 1), rank=2)
    queue.put(pieces(9, 0), rank=1)
    assert [taken(queue) for _ in range(3)] == [[(9, 0)], [(5, 0)], [(5, 1)]]


def test_small_pieces_go_together_up_to_a_bound() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0, 1, 2, 3), rank=1)
    assert taken(queue, 30) == [(1, 0), (1, 1), (1, 2)]
    assert taken(queue, 5) == [(1, 3)]


def test_a_discarded_transfer_is_not_sent() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0), rank=1)
    queue.put(pieces(2, 0), rank=2)
    queue.discard(1)
    queue.discard(7)
    assert taken(queue, 100) == [(2, 0)]


def test_a_closed_queue_gives_nothing() -> None:
    queue = SendQueue()
    queue.put(pieces(1, 0), rank=1)
    queue.close()
    assert taken(queue) == []


def test_another_order_can_take_its_place() -> None:
    seen: list[Sequence[Waiting]] = []

    def shortest(waiting: Sequence[Waiting]) -> int:
        seen.append(waiting)
        return min(waiting, key=lambda transfer: transfer.queued_bytes).number

    queue = SendQueue(shortest)
    queue.put(pieces(1, 0, 1, 2), rank=1)
    queue.put(pieces(2, 0), rank=2)
    assert taken(queue) == [(2, 0)]
    assert {transfer.queued_bytes for transfer in seen[0]} == {30, 10}


def test_first_come_is_a_pure_choice() -> None:
    waiting = [Waiting(number=3, rank=7, queued_bytes=1), Waiting(number=4, rank=6, queued_bytes=9)]
    assert first_come(waiting) == 4


def test_the_last_bytes_are_shared_by_all_takers() -> None:
    queue = SendQueue()
    queue.put([Piece(number=1, key=b"k", index=0, offset=0, length=2**20)], rank=0)
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
    queue.put([Piece(number=1, key=b"k", index=i, offset=0, length=2**20) for i in range(8)], rank=0)
    assert queue.take(2**20, num_takers=4)[0].length == 2**20
