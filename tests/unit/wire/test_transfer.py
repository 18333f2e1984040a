"""Sender and receiver machines, alone and against each other under every interleaving Hypothesis finds."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.kit.scale import EXAMPLES

from pdd.core.errors import LocalProtocolError, RemoteProtocolError
from pdd.wire import frames as f
from pdd.wire import receiver as rx
from pdd.wire import sender as tx

CHUNK = 10
PIECE = 4
HELD, LANDING, ELSEWHERE = rx.Placement.HELD, rx.Placement.LANDING, rx.Placement.ELSEWHERE


def make_receiver(*placements: rx.Placement, end: bool = False) -> rx.Receiver:
    receiver = rx.Receiver(number=1, chunk_bytes=CHUNK)
    if placements:
        receiver.step(rx.Offered(first=0, placements=placements))
    if end:
        receiver.step(rx.EndSeen(total=len(placements)))
    return receiver


def land(receiver: rx.Receiver, index: int, *, size: int = PIECE) -> list[rx.Effect]:
    effects: list[rx.Effect] = []
    for offset in range(0, CHUNK, size):
        length = min(size, CHUNK - offset)
        assert receiver.claim(index=index, offset=offset, length=length)
        effects = receiver.step(rx.PieceArrived(index=index, offset=offset, intact=True))
        receiver.check_invariants()
    return effects


def make_sender(*, num_keys: int = 0, complete: bool = False, opened: bool = True) -> tx.Sender:
    sender = tx.Sender(transfer="t", chunk_bytes=CHUNK, piece_bytes=PIECE)
    if num_keys:
        sender.step(tx.Grown(keys=tuple(b"%d" % i for i in range(num_keys))))
    if complete:
        sender.step(tx.Completed())
    if opened:
        sender.step(tx.Opened(number=1))
    return sender


class TestReceiver:
    def test_what_is_lacking_is_wanted(self) -> None:
        receiver = rx.Receiver(number=1, chunk_bytes=CHUNK)
        effects = receiver.step(rx.Offered(first=0, placements=(HELD, LANDING, ELSEWHERE, LANDING)))
        assert effects == [rx.Send(frame=f.Want(number=1, indices=[1, 3], answered=4))]
        effects = receiver.step(rx.Offered(first=4, placements=(HELD,)))
        assert effects == [rx.Send(frame=f.Want(number=1, indices=[], answered=5))]
        assert receiver.step(rx.Offered(first=5, placements=())) == []

    def test_unasked_pieces_are_taken_for_what_was_lacking_at_the_offer_and_no_other(self) -> None:
        receiver = make_receiver(HELD, LANDING, ELSEWHERE)
        taken = [receiver.claim(index=i, offset=0, length=4, is_unasked=True) for i in range(3)]
        assert taken == [False, True, False]
        receiver.step(rx.NowOurs(index=2))  # the sender cuts it anew when it is wanted
        assert not receiver.claim(index=2, offset=0, length=4, is_unasked=True)
        assert receiver.claim(index=2, offset=0, length=4)

    def test_a_chunk_is_committed_before_it_is_acknowledged(self) -> None:
        assert land(make_receiver(LANDING), 0) == [
            rx.Commit(index=0),
            rx.Send(frame=f.Ack(number=1, indices=[0])),
        ]

    def test_the_last_chunk_after_the_end_lands_the_transfer(self) -> None:
        receiver = make_receiver(HELD, LANDING, end=True)
        assert land(receiver, 1)[-2:] == [rx.EndLeases(keep=True), rx.Announce()]
        assert receiver.state is rx.State.LANDED

    def test_the_end_after_the_last_chunk_lands_the_transfer(self) -> None:
        receiver = make_receiver(LANDING)
        land(receiver, 0)
        assert rx.Announce() in receiver.step(rx.EndSeen(total=1))

    def test_a_corrupt_piece_is_wanted_again_and_only_it(self) -> None:
        receiver = make_receiver(LANDING)
        receiver.claim(index=0, offset=4, length=4)
        effects = receiver.step(rx.PieceArrived(index=0, offset=4, intact=False))
        assert effects == [rx.Send(frame=f.Want(number=1, indices=[], pieces=[(0, 4, 4)]))]
        assert land(receiver, 0)[0] == rx.Commit(index=0)

    def test_too_many_corrupt_pieces_fail_it(self) -> None:
        receiver = make_receiver(LANDING, LANDING)
        effects: list[rx.Effect] = []
        for _ in range(rx.MAX_CORRUPT_PIECES + 1):
            receiver.claim(index=0, offset=0, length=4)
            effects = receiver.step(rx.PieceArrived(index=0, offset=0, intact=False))
        assert effects[:2] == [rx.Abort(indices=(0, 1)), rx.EndLeases(keep=False)]
        assert isinstance(effects[2], rx.Send)
        assert effects[2].frame.reason == "corrupt"  # type: ignore[union-attr]

    def test_pieces_may_come_in_any_order_and_size(self) -> None:
        receiver = make_receiver(LANDING)
        for offset, length in ((7, 3), (0, 1), (1, 6)):
            assert receiver.claim(index=0, offset=offset, length=length)
            effects = receiver.step(rx.PieceArrived(index=0, offset=offset, intact=True))
        assert effects[0] == rx.Commit(index=0)

    def test_a_repeated_piece_is_dropped(self) -> None:
        receiver = make_receiver(LANDING)
        assert receiver.claim(index=0, offset=0, length=4)
        assert not receiver.claim(index=0, offset=0, length=4)
        receiver = make_receiver(HELD)
        assert not receiver.claim(index=0, offset=0, length=4)

    @pytest.mark.parametrize(("index", "offset", "length"), [(1, 0, 4), (0, 8, 4), (0, 2, 4), (2, 0, 1)])
    def test_a_piece_outside_or_over_another_is_the_peers_error(
        self, index: int, offset: int, length: int
    ) -> None:
        receiver = make_receiver(LANDING, ELSEWHERE)
        receiver.claim(index=0, offset=0, length=4)
        with pytest.raises(RemoteProtocolError):
            receiver.claim(index=index, offset=offset, length=length)

    def test_a_chunk_that_lands_elsewhere_counts(self) -> None:
        receiver = make_receiver(ELSEWHERE, end=True)
        assert receiver.step(rx.NowHeld(index=0)) == [rx.EndLeases(keep=True), rx.Announce()]

    def test_a_chunk_that_dies_elsewhere_is_wanted_then(self) -> None:
        receiver = make_receiver(ELSEWHERE, end=True)
        assert receiver.step(rx.NowOurs(index=0)) == [rx.Send(frame=f.Want(number=1, indices=[0]))]
        assert rx.Announce() in land(receiver, 0)

    def test_cancel_gives_all_back_and_late_pieces_are_dropped(self) -> None:
        receiver = make_receiver(HELD, LANDING)
        receiver.claim(index=1, offset=0, length=4)
        assert receiver.step(rx.CancelSeen()) == [rx.Abort(indices=(1,)), rx.EndLeases(keep=False)]
        assert receiver.step(rx.PieceArrived(index=1, offset=0, intact=True)) == []
        assert not receiver.claim(index=1, offset=4, length=4)

    def test_a_cancel_that_crosses_landed_ends_the_lease(self) -> None:
        receiver = make_receiver(HELD, end=True)
        assert receiver.step(rx.CancelSeen()) == [rx.EndLeases(keep=False)]

    def test_a_lost_session_keeps_what_is_held_for_a_while(self) -> None:
        receiver = make_receiver(HELD, LANDING)
        assert receiver.step(rx.ConnectionLost()) == [rx.Abort(indices=(1,)), rx.EndLeases(keep=True)]

    def test_giving_up_is_said_last(self) -> None:
        effects = make_receiver(LANDING).step(rx.GiveUp(reason="store_full"))
        assert effects[-1] == rx.Send(frame=f.Failed(number=1, reason="store_full"))

    @pytest.mark.parametrize(
        "event",
        [rx.Offered(first=2, placements=(HELD,)), rx.EndSeen(total=2), rx.Offered(first=0, placements=())],
    )
    def test_wrong_counts_are_the_peers_error(self, event: rx.Event) -> None:
        with pytest.raises(RemoteProtocolError):
            make_receiver(LANDING).step(event)

    def test_events_out_of_state(self) -> None:
        ended = make_receiver(LANDING, end=True)
        for event in (rx.Offered(first=1, placements=(HELD,)), rx.EndSeen(total=1)):
            with pytest.raises(RemoteProtocolError):
                ended.step(event)
        with pytest.raises(LocalProtocolError):
            make_receiver(HELD, end=True).step(rx.NowHeld(index=0))
        with pytest.raises(LocalProtocolError):
            make_receiver(LANDING).step(rx.NowHeld(index=0))


class TestSender:
    def test_chunks_are_offered_as_they_come_and_ended_once(self) -> None:
        sender = make_sender()
        assert sender.step(tx.Grown(keys=(b"a", b"b"))) == [
            tx.Send(frame=f.Offer(number=1, transfer="t", first=0, keys=[b"a", b"b"]))
        ]
        assert sender.step(tx.Grown(keys=(b"c",))) == [
            tx.Send(frame=f.Offer(number=1, transfer="t", first=2, keys=[b"c"]))
        ]
        assert sender.step(tx.Completed()) == [tx.Send(frame=f.End(number=1, total=3))]

    def test_what_came_before_the_session_is_offered_then(self) -> None:
        sender = make_sender(num_keys=f.MAX_KEYS_PER_OFFER + 1, complete=True, opened=False)
        effects = sender.step(tx.Opened(number=9))
        frames = [effect.frame for effect in effects if isinstance(effect, tx.Send)]
        assert [type(frame) for frame in frames] == [f.Offer, f.Offer, f.End]
        assert frames[1].first == f.MAX_KEYS_PER_OFFER  # type: ignore[union-attr]

    def test_wanted_chunks_are_cut_into_pieces(self) -> None:
        effects = make_sender(num_keys=2).step(tx.WantSeen(indices=[1]))
        assert effects == [tx.Enqueue(pieces=((1, 0, 4), (1, 4, 4), (1, 8, 2)))]

    def test_unasked_chunks_that_are_wanted_are_not_sent_twice(self) -> None:
        sender = make_sender(num_keys=3)
        effects = sender.step(tx.SendUnasked(indices=(0, 1)))
        pieces = ((0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 4), (1, 4, 4), (1, 8, 2))
        assert effects == [tx.Enqueue(pieces=pieces, is_unasked=True)]
        assert sender.unasked_bytes == sender.outstanding_bytes == 2 * CHUNK
        assert sender.step(tx.WantSeen(indices=[0, 2], answered=3)) == [
            tx.Withdraw(indices=(1,)),
            tx.Enqueue(pieces=((2, 0, 4), (2, 4, 4), (2, 8, 2))),
        ]
        assert [sender.peer_lacks(index) for index in range(4)] == [True, False, True, None]
        # A chunk that was declined because another transfer landed it may be wanted later after all.
        assert sender.step(tx.WantSeen(indices=[1])) == [tx.Enqueue(pieces=pieces[3:])]

    def test_a_cut_forgets_what_was_sent_unasked(self) -> None:
        sender = make_sender(num_keys=1)
        sender.step(tx.SendUnasked(indices=(0,)))
        sender.step(tx.ConnectionLost())
        assert sender.outstanding_bytes == 0
        sender.step(tx.Opened(number=2))
        assert sender.step(tx.WantSeen(indices=[0], answered=1)) == [
            tx.Enqueue(pieces=((0, 0, 4), (0, 4, 4), (0, 8, 2)))
        ]

    def test_landed_needs_every_wanted_chunk_acknowledged(self) -> None:
        sender = make_sender(num_keys=2, complete=True)
        sender.step(tx.WantSeen(indices=[0, 1]))
        sender.step(tx.AckSeen(indices=[0]))
        assert sender.outstanding_bytes == CHUNK
        with pytest.raises(RemoteProtocolError):
            sender.step(tx.LandedSeen())
        sender.step(tx.AckSeen(indices=[1]))
        assert sender.step(tx.LandedSeen()) == [tx.Land()]
        assert sender.num_crossed == 2

    def test_after_a_cut_everything_is_offered_again_under_a_new_number(self) -> None:
        sender = make_sender(num_keys=2, complete=True)
        sender.step(tx.WantSeen(indices=[0, 1]))
        sender.step(tx.AckSeen(indices=[0]))
        assert sender.step(tx.ConnectionLost()) == [tx.Unqueue()]
        assert sender.outstanding_bytes == 0
        effects = sender.step(tx.Opened(number=2))
        assert [effect.frame.number for effect in effects] == [2, 2]  # type: ignore[union-attr]
        sender.step(tx.WantSeen(indices=[1]))
        sender.step(tx.AckSeen(indices=[1]))
        assert sender.step(tx.LandedSeen()) == [tx.Land()]

    def test_stop_is_told_to_the_peer_only_where_there_is_one(self) -> None:
        assert make_sender(num_keys=1).step(tx.Stop(reason="cancelled")) == [
            tx.Unqueue(),
            tx.Fail(reason="cancelled", detail=""),
            tx.Send(frame=f.Cancel(number=1)),
        ]
        assert make_sender(opened=False).step(tx.Stop(reason="x")) == [tx.Fail(reason="x", detail="")]

    def test_what_crosses_the_cancel_is_late_not_wrong(self) -> None:
        sender = make_sender(num_keys=1)
        sender.step(tx.Stop(reason="cancelled"))
        for event in (
            tx.WantSeen(indices=[0]),
            tx.AckSeen(indices=[0]),
            tx.LandedSeen(),
            tx.FailedSeen(reason="", detail=""),
            tx.ConnectionLost(),
            tx.Stop(reason="again"),
            tx.Grown(keys=(b"x",)),
        ):
            assert sender.step(event) == []

    @pytest.mark.parametrize(
        "event",
        [
            tx.WantSeen(indices=[2]),
            tx.WantSeen(indices=[0]),
            tx.WantSeen(indices=[], answered=3),
            tx.WantSeen(indices=[], answered=1),
            tx.WantSeen(indices=[1]),
            tx.AckSeen(indices=[1]),
            tx.WantSeen(indices=[], pieces=[(1, 0, 4)]),
            tx.WantSeen(indices=[], pieces=[(0, 8, 4)]),
            tx.WantSeen(indices=[], pieces=[(0, 0, 5)]),
            tx.WantSeen(indices=[], pieces=[(0, 0, 0)]),
            tx.WantSeen(indices=[], pieces=[(0, 0, 4)] * (tx.MAX_RESENT_PIECES + 1)),
            tx.LandedSeen(),
        ],
    )
    def test_what_a_peer_must_not_ask(self, event: tx.Event) -> None:
        sender = make_sender(num_keys=2)
        sender.step(tx.WantSeen(indices=[0]))
        sender.step(tx.SendUnasked(indices=(1,)))
        if event == tx.WantSeen(indices=[], answered=1):
            sender.step(tx.WantSeen(indices=[], answered=2))  # answers do not go back
        with pytest.raises(RemoteProtocolError):
            sender.step(event)

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_only_open_offers_are_sent_unasked(self, index: int) -> None:
        sender = make_sender(num_keys=2)
        sender.step(tx.WantSeen(indices=[], answered=1))
        sender.step(tx.SendUnasked(indices=(1,)))
        with pytest.raises(LocalProtocolError):
            sender.step(tx.SendUnasked(indices=(index,)))

    def test_own_mistakes_are_local(self) -> None:
        with pytest.raises(LocalProtocolError):
            make_sender().step(tx.Opened(number=2))
        with pytest.raises(LocalProtocolError):
            make_sender(num_keys=1, complete=True).step(tx.Grown(keys=(b"x",)))
        with pytest.raises(RemoteProtocolError):
            make_sender(opened=False).step(tx.LandedSeen())


class TransferMachine(RuleBasedStateMachine):
    """Both halves over a line with two directions that can be lost, and pieces that can be corrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = tx.Sender(transfer="t", chunk_bytes=CHUNK, piece_bytes=PIECE)
        self.receiver: rx.Receiver | None = None
        self.visible: set[int] = set()
        self.elsewhere: set[int] = set()
        self.reserved: set[int] = set()
        self.to_receiver: deque[Any] = deque()
        self.to_sender: deque[Any] = deque()
        self.pieces: list[tuple[tuple[int, int, int], bool]] = []
        self.number = 0
        self.num_keys = 0
        self.is_complete = False
        self.outcome = ""
        self.announced = False

    def send_step(self, event: tx.Event) -> None:
        for effect in self.sender.step(event):
            match effect:
                case tx.Send(frame=frame):
                    self.to_receiver.append(frame)
                case tx.Enqueue(pieces=pieces, is_unasked=is_unasked):
                    self.pieces += [(piece, is_unasked) for piece in pieces]
                case tx.Withdraw():
                    pass  # the worst case: they had all left
                case tx.Unqueue():
                    self.pieces.clear()
                case tx.Land():
                    assert not self.outcome
                    self.outcome = "landed"
                    assert self.visible >= set(range(self.num_keys))
                case tx.Fail(reason=reason):
                    assert not self.outcome
                    self.outcome = reason

    def receive_step(self, event: rx.Event) -> None:
        assert self.receiver is not None
        for effect in self.receiver.step(event):
            match effect:
                case rx.Send(frame=frame):
                    self.to_sender.append(frame)
                case rx.Commit(index=index):
                    self.reserved.remove(index)
                    self.visible.add(index)
                case rx.Abort(indices=indices):
                    self.reserved -= set(indices)
                case rx.Announce():
                    assert self.visible >= set(range(self.num_keys))
                    self.to_sender.append(f.Landed(number=self.receiver.number))

    @property
    def is_connected(self) -> bool:
        return self.receiver is not None

    @precondition(lambda self: not self.is_connected and self.sender.state is tx.State.PARKED)
    @rule()
    def connect(self) -> None:
        self.number += 1
        self.receiver = rx.Receiver(number=self.number, chunk_bytes=CHUNK)
        self.send_step(tx.Opened(number=self.number))

    @precondition(lambda self: self.is_connected)
    @rule()
    def lose(self) -> None:
        self.receive_step(rx.ConnectionLost())
        self.receiver = None
        assert not self.reserved
        self.to_receiver.clear()
        self.to_sender.clear()
        self.send_step(tx.ConnectionLost())

    @precondition(lambda self: not self.is_complete)
    @rule(count=st.integers(1, 3))
    def grow(self, count: int) -> None:
        keys = tuple(b"%d" % i for i in range(self.num_keys, self.num_keys + count))
        self.num_keys += count
        self.send_step(tx.Grown(keys=keys))

    @precondition(lambda self: self.sender.state is tx.State.OPEN)
    @rule(count=st.integers(1, 3))
    def send_unasked(self, count: int) -> None:
        taken = self.sender.unasked
        free = [i for i in range(self.sender.num_answered, self.num_keys) if i not in taken]
        self.send_step(tx.SendUnasked(indices=tuple(free[:count])))

    @precondition(lambda self: not self.is_complete and self.num_keys)
    @rule()
    def complete(self) -> None:
        self.is_complete = True
        self.send_step(tx.Completed())

    @precondition(lambda self: self.to_receiver)
    @rule(drawn=st.data())
    def deliver_to_receiver(self, drawn: st.DataObject) -> None:
        match self.to_receiver.popleft():
            case f.Offer(first=first, keys=keys):
                placements = []
                for index in range(first, first + len(keys)):
                    if index in self.visible:
                        placements.append(HELD)
                    elif drawn.draw(st.booleans()):
                        self.elsewhere.add(index)
                        placements.append(ELSEWHERE)
                    else:
                        self.reserved.add(index)
                        placements.append(LANDING)
                if self.receiver is not None and not self.receiver.is_active:
                    self.reserved -= set(range(first, first + len(keys)))
                self.receive_step(rx.Offered(first=first, placements=tuple(placements)))
            case f.End(total=total):
                self.receive_step(rx.EndSeen(total=total))
            case f.Cancel():
                self.receive_step(rx.CancelSeen())

    @precondition(lambda self: self.to_sender)
    @rule()
    def deliver_to_sender(self) -> None:
        match self.to_sender.popleft():
            case f.Want(indices=indices, pieces=pieces, answered=answered):
                self.send_step(tx.WantSeen(indices=indices, pieces=pieces, answered=answered))
            case f.Ack(indices=indices):
                self.send_step(tx.AckSeen(indices=indices))
            case f.Landed():
                self.send_step(tx.LandedSeen())
            case f.Failed(reason=reason, detail=detail):
                self.send_step(tx.FailedSeen(reason=reason, detail=detail))

    @precondition(lambda self: self.pieces and self.is_connected)
    @rule(at=st.integers(0, 1000), intact=st.sampled_from([True] * 5 + [False]))
    def deliver_piece(self, at: int, intact: bool) -> None:
        assert self.receiver is not None
        at %= len(self.pieces)
        (index, offset, length), is_unasked = self.pieces[at]
        if is_unasked and self.receiver.is_active and index >= self.receiver.num_offered:
            return  # it waits for its offer
        self.pieces.pop(at)
        if self.receiver.claim(index=index, offset=offset, length=length, is_unasked=is_unasked):
            self.receive_step(rx.PieceArrived(index=index, offset=offset, intact=intact))

    @precondition(lambda self: self.elsewhere and self.is_connected and self.receiver.is_active)
    @rule(lands=st.booleans())
    def settle_elsewhere(self, lands: bool) -> None:
        index = self.elsewhere.pop()
        assert self.receiver is not None
        if index >= self.receiver.num_offered or index in self.visible or index in self.reserved:
            return
        if lands:
            self.visible.add(index)
            self.receive_step(rx.NowHeld(index=index))
        else:
            self.reserved.add(index)
            self.receive_step(rx.NowOurs(index=index))

    @rule(chance=st.integers(0, 15))
    def cancel(self, chance: int) -> None:
        if chance == 0:
            self.send_step(tx.Stop(reason="cancelled"))

    @invariant()
    def consistent(self) -> None:
        self.sender.check_invariants()
        if self.receiver is not None:
            self.receiver.check_invariants()
            assert self.receiver.is_active or not self.reserved


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=40 * EXAMPLES, stateful_step_count=50)


@given(st.lists(st.sampled_from([HELD, LANDING]), min_size=1, max_size=6), st.integers(1, CHUNK))
def test_any_mix_lands_with_the_wanted_bytes_and_no_more(placements: list[rx.Placement], piece: int) -> None:
    sender = tx.Sender(transfer="t", chunk_bytes=CHUNK, piece_bytes=piece)
    sender.step(tx.Grown(keys=tuple(b"%d" % i for i in range(len(placements)))))
    sender.step(tx.Completed())
    sender.step(tx.Opened(number=1))
    receiver = make_receiver(*placements, end=True)
    wanted = [i for i, placement in enumerate(placements) if placement is LANDING]
    sent_bytes = 0
    if wanted:
        (enqueue,) = sender.step(tx.WantSeen(indices=wanted))
        assert isinstance(enqueue, tx.Enqueue)
        for index, offset, length in enqueue.pieces:
            sent_bytes += length
            assert receiver.claim(index=index, offset=offset, length=length)
            receiver.step(rx.PieceArrived(index=index, offset=offset, intact=True))
        sender.step(tx.AckSeen(indices=wanted))
    assert receiver.state is rx.State.LANDED
    assert sender.step(tx.LandedSeen()) == [tx.Land()]
    assert sent_bytes == len(wanted) * CHUNK
