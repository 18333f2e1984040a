"""Every error a client can get: one table from class to status, one shape for the body.

Shape and types are vLLM's: ``{"error": {"message", "type", "param", "code"}}`` with a numeric ``code``.

Source:
    vllm/entrypoints/serve/engine/protocol.py@0.32.0 (``ErrorResponse``).
"""

from typing import Any

from aiohttp import web

from pdd.core.errors import (
    DeadlineError,
    EngineError,
    NoEndpointError,
    OverloadedError,
    PddError,
    ProtocolError,
    TransportError,
)


class ClientError(PddError):
    """The client has to change its request.

    Args:
        message: What is wrong, naming the field.
        param: The field.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequestError(ClientError):
    """The request cannot be understood or asks for what does not exist here."""


class UnauthorizedError(ClientError):
    """The API key is missing or wrong."""


class NotFoundError(ClientError):
    """The model or page does not exist."""


class MethodError(ClientError):
    """The page exists, but not with this method."""


class TooLargeError(ClientError):
    """The body is over the limit."""


STATUS: tuple[tuple[type[PddError], int, str], ...] = (
    (BadRequestError, 400, "BadRequestError"),
    (UnauthorizedError, 401, "AuthenticationError"),
    (NotFoundError, 404, "NotFoundError"),
    (MethodError, 405, "MethodNotAllowedError"),
    (TooLargeError, 413, "RequestTooLargeError"),
    (OverloadedError, 429, "RateLimitError"),
    (NoEndpointError, 503, "ServiceUnavailableError"),
    (DeadlineError, 504, "TimeoutError"),
    (TransportError, 502, "BadGatewayError"),
    (ProtocolError, 502, "BadGatewayError"),
)
"""First match counts; anything else is a bug of ours and a 500."""

_TYPE_OF_STATUS = {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError"}
RETRY_AFTER_S = 1


def status_and_body(error: PddError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and JSON body of an error."""
    param = getattr(error, "param", None)
    status, kind = 500, "InternalServerError"
    if isinstance(error, EngineError):
        status = error.status
        kind = error.kind or _TYPE_OF_STATUS.get(
            status, "InternalServerError" if status == 500 else "BadGatewayError"
        )
    else:
        for cls, known_status, known_kind in STATUS:
            if isinstance(error, cls):
                status, kind = known_status, known_kind
                break
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": status}}


def error_response(error: PddError) -> web.Response:
    """The error as an HTTP answer; overload and missing engines say when to come back."""
    status, body = status_and_body(error)
    retry_after_s = getattr(error, "retry_after_s", None) or RETRY_AFTER_S
    headers = {"Retry-After": str(retry_after_s)} if status in (429, 503) else {}
    return web.json_response(body, status=status, headers=headers)
