"""The news of one request's transfers."""

import pytest

from pdd.router.metrics import RouterMetrics
from pdd.router.records import Record
from pdd.router.request.events import Event, Landed, TransferFailed
from pdd.router.request.transfers import TransferLog


def test_what_lands_again_is_released_again() -> None:
    """A request whose connection was lost is sent again with its order, and the agent may have had it."""
    released: list[tuple[int, str]] = []
    posted: list[Event] = []
    record = Record(id="r", arrived_s=0.0)
    metrics = RouterMetrics()
    transfers = TransferLog(
        record=record,
        metrics=metrics,
        post=posted.append,
        release=lambda attempt, peer: released.append((attempt, peer)),
        is_wan=lambda *_: False,
        now_s=lambda: 0.0,
        believed_missing={},
    )
    listen = transfers.listener(1, "p0", ("rld0",))
    landed = {"event": "landed", "transfer": "r-1", "peer": "rld0", "chunks": 1, "tokens": 32}
    listen(landed)
    listen(landed)
    assert posted == [Landed(attempt=1, peer="rld0")] * 2
    assert 'result="landed",src="p0"} 1.0' in metrics.text().decode()
    transfers.close()
    listen(landed)
    assert released == [(1, "rld0")]


def test_news_of_a_transfer_is_taken_also_when_its_engines_have_left_the_fleet() -> None:
    sites = {"p0": "a", "rld0": "a", "md0": "b"}
    posted: list[Event] = []
    record = Record(id="r", arrived_s=0.0)
    transfers = TransferLog(
        record=record,
        metrics=RouterMetrics(),
        post=posted.append,
        release=lambda attempt, peer: pytest.fail(f"nothing landed: {attempt}, {peer}"),
        is_wan=lambda prefill, peer: sites[prefill] != sites[peer],
        now_s=lambda: 0.0,
        believed_missing={},
    )
    listen = transfers.listener(1, "p0", ("rld0", "md0"))
    sites.clear()
    listen({"event": "failed", "transfer": "r-1", "peer": None, "reason": "agent_lost", "bytes_sent": 7})
    assert [e.peer for e in posted if isinstance(e, TransferFailed)] == ["rld0", "md0"]
    assert record.wan_bytes == 7  # of MD's alone
