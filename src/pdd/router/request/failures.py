"""What failed, as an error of the code and as the state machine knows it, and which error the client gets."""

from pdd.core.errors import DeadlineError, EngineError, NoEndpointError, PddError, TransportError
from pdd.router.request.events import Failure

_TRANSIENT_STATUS = frozenset({408, 429})


def failure_of(error: PddError) -> Failure:
    """The failure as the state machine knows it."""
    if isinstance(error, EngineError):
        retryable = error.status >= 500 or error.status in _TRANSIENT_STATUS
        return Failure(
            kind="engine_error",
            message=str(error),
            status=error.status,
            retryable=retryable,
            error_type=error.kind,
            param=error.param,
        )
    kind = "engine_lost" if isinstance(error, TransportError) else "engine_garbled"
    return Failure(kind=kind, message=str(error), status=502)


def error_of(failure: Failure) -> PddError:
    """The error a failure becomes for the client."""
    if failure.kind == "deadline":
        return DeadlineError(failure.message)
    if failure.kind in ("no_prefill_engine", "no_engine_left"):
        return NoEndpointError(failure.message)
    return EngineError(failure.status or 502, failure.message, kind=failure.error_type, param=failure.param)
