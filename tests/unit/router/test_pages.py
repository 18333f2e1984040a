"""Records, beliefs and errors."""

import pytest

from pdd.core.errors import (
    ConnectError,
    DeadlineError,
    EngineError,
    NoEndpointError,
    OverloadedError,
    PddError,
    RemoteProtocolError,
)
from pdd.router.api.errors import BadRequestError, NotFoundError, TooLargeError, status_and_body
from pdd.router.records import Record, RecordRing


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequestError("x", param="p"), 400, "BadRequestError"),
        (NotFoundError("x"), 404, "NotFoundError"),
        (TooLargeError("x"), 413, "RequestTooLargeError"),
        (OverloadedError("x"), 429, "RateLimitError"),
        (NoEndpointError("x"), 503, "ServiceUnavailableError"),
        (DeadlineError("x"), 504, "TimeoutError"),
        (ConnectError("x"), 502, "BadGatewayError"),
        (RemoteProtocolError("x"), 502, "BadGatewayError"),
        (EngineError(422, "x"), 422, "UnprocessableEntityError"),
        (EngineError(400, "x", kind="Special", param="p"), 400, "Special"),
        (PddError("x"), 500, "InternalServerError"),
    ],
)
def test_each_class_has_one_status(error: PddError, status: int, kind: str) -> None:
    assert status_and_body(error) == (
        status,
        {"error": {"message": "x", "type": kind, "param": getattr(error, "param", None), "code": status}},
    )


def test_the_ring_forgets_the_oldest_and_an_id_that_comes_again_is_the_newer() -> None:
    ring = RecordRing(max_records=2)
    for name in ("a", "b", "a", "c"):
        ring.add(Record(id=name, arrived_s=0.0))
    assert [record.id for record in ring.all()] == ["a", "c"]
    assert ring.get("chatcmpl-a") is ring.get("cmpl-a") is ring.get("a")
    assert ring.get("b") is None
