"""Follows the KV transfers of one request: what landed, what failed, and the bytes it cost.

It outlives the request a little: a cancelled transfer's final byte count comes after the answer's end.
"""

from collections.abc import Callable, Mapping

from pdd.router.agents import AgentEvent
from pdd.router.metrics import RouterMetrics
from pdd.router.records import Record
from pdd.router.request.events import Event, Landed, TransferFailed, TransferStalled


class TransferLog:
    """Translates one request's transfer events and writes them into its record.

    Args:
        record: Written to.
        metrics: Counted in.
        post: Takes the events for the state machine, until ``close``.
        release: Ends the lease of what lands after that: attempt and peer.
        is_wan: Whether the path from a prefill engine to a peer leaves the site.
        now_s: Seconds since the request arrived.
        believed_missing: Chunks of the prompt that a peer was believed to lack when the request was planned.
    """

    def __init__(
        self,
        *,
        record: Record,
        metrics: RouterMetrics,
        post: Callable[[Event], None],
        release: Callable[[int, str], None],
        is_wan: Callable[[str, str], bool],
        now_s: Callable[[], float],
        believed_missing: Mapping[str, int],
    ) -> None:
        self._believed_missing = believed_missing
        self._post: Callable[[Event], None] | None = post
        self._release = release
        self.landed_tokens: dict[str, int] = {}
        self._record = record
        self._metrics = metrics
        self._is_wan = is_wan
        self._now_s = now_s
        self._wan_bytes: dict[tuple[int, str], int] = {}
        self._without_drc: dict[tuple[int, str], int] = {}
        self._ended: set[tuple[int, str]] = set()

    def close(self) -> None:
        """The request is over: from now on only bytes are counted and leases ended."""
        self._post = None

    def listener(self, attempt: int, prefill: str, targets: tuple[str, ...]) -> Callable[[AgentEvent], None]:
        """A listener for the events of one attempt's transfer, also when its engines are long forgotten."""
        is_wan = {peer: self._is_wan(prefill, peer) for peer in targets}

        def listen(event: AgentEvent) -> None:
            peers = targets if event.get("peer") is None else (event["peer"],)
            for peer in peers:
                self._take(attempt, prefill, peer, event, wan=is_wan.get(peer, False))

        return listen

    def _take(self, attempt: int, prefill: str, peer: str, event: AgentEvent, *, wan: bool) -> None:
        kind = event["event"]
        if wan:
            self._count_bytes(attempt, prefill, peer, event)
        if kind == "stalled" and (attempt, peer) not in self._ended:
            self._say(TransferStalled(attempt=attempt, peer=peer))
        if kind not in ("landed", "failed"):
            return
        if (attempt, peer) in self._ended:
            # A request that is sent again since its connection was lost orders its transfer again: what lands
            # then is nothing new, but the peer holds it until somebody says that it need not.
            if kind == "landed":
                self._say(Landed(attempt=attempt, peer=peer))
            return
        self._ended.add((attempt, peer))
        if kind == "landed":
            self._on_landed(attempt, prefill, peer, event, wan=wan)
        else:
            reason = str(event.get("reason", "unknown"))
            self._metrics.transfers.labels(src=prefill, dst=peer, result=reason).inc()
            self._say(
                TransferFailed(
                    attempt=attempt, peer=peer, reason=reason, is_certain=event.get("peer") is not None
                )
            )

    def _on_landed(self, attempt: int, prefill: str, peer: str, event: AgentEvent, *, wan: bool) -> None:
        self.landed_tokens[peer] = int(event.get("tokens", 0))
        self._metrics.transfers.labels(src=prefill, dst=peer, result="landed").inc()
        if wan:
            self._record.wan_landed_s = self._now_s()
            self._note_without_drc(attempt, peer, int(event.get("full_bytes", 0)))
            self._record.prefill_overlap_ratio = event.get("prefill_overlap_ratio")
            self._metrics.wan_transfer_s.observe(float(event.get("elapsed_s", 0.0)))
            saved_chunks = int(event.get("chunks", 0)) - int(event.get("chunks_sent", 0))
            if attempt == 1 and peer in self._believed_missing:
                error = abs(self._believed_missing[peer] - int(event.get("chunks_sent", 0)))
                self._metrics.hit_error.labels(engine=peer).observe(error)
            chunk_tokens = self.landed_tokens[peer] // max(1, int(event.get("chunks", 1)))
            self._metrics.delta_saved_tokens.inc(max(0, saved_chunks) * chunk_tokens)
        else:
            self._record.rld_landed_s = self._now_s()
        self._say(Landed(attempt=attempt, peer=peer))

    def _count_bytes(self, attempt: int, prefill: str, peer: str, event: AgentEvent) -> None:
        total = event.get("wan_bytes", event.get("bytes_sent"))
        if total is None:
            return
        before = self._wan_bytes.get((attempt, peer), 0)
        after = max(before, int(total))
        self._wan_bytes[attempt, peer] = after
        self._record.wan_bytes += after - before
        self._metrics.wan_bytes.labels(src=prefill, dst=peer).inc(after - before)
        if event["event"] != "landed":  # what crossed without landing would have crossed anyhow
            self._note_without_drc(attempt, peer, after)

    def _note_without_drc(self, attempt: int, peer: str, num_bytes: int) -> None:
        self._without_drc[attempt, peer] = num_bytes
        self._record.wan_bytes_without_drc = sum(self._without_drc.values())

    def _say(self, event: Event) -> None:
        if self._post is not None:
            self._post(event)
        elif isinstance(event, Landed):
            self._release(event.attempt, event.peer)
