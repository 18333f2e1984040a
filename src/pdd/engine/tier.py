"""The secondary tier: tells the agent what vLLM does, and vLLM what the agent's store holds.

No KV byte passes through here. Every method runs on the engine's scheduler thread and only queues messages or
looks at the link's mirror of the store; copies are the agent's.

Source:
    vllm/v1/kv_offload/tiering/base.py@0.32.0 (``SecondaryTierManager``).
"""

import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar

from pdd.core.errors import ConfigurationError
from pdd.engine.agent_link import AgentLink
from pdd.engine.identity import make_fingerprint, model_digest
from pdd.engine.orders import Chunk, ChunkOrder, TransferOrder, in_prefix_order, parse_order
from pdd.engine.promotion import Answer, PromotionBound
from pdd.engine.shape import SAMPLER_KEY, CacheShape
from pdd.engine.spec import PddOffloadingSpec
from pdd.engine.vllm_api import (
    JobResult,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
    expected_root_hash,
    get_offload_group_idx,
    init_logger,
    keys_in_prefix_order,
    root_block_hash,
)
from pdd.wire.local import LOCAL_VERSION, BeginTransfer, Hello, LoadChunks, StoreChunks

logger = init_logger("vllm.pdd.tier")

CONNECTED = "vllm:pdd_agent_connected"
MIRROR_CHUNKS = "vllm:pdd_store_chunks"
LOOKUPS_BOUNDED = "vllm:pdd_lookups_bounded"

DRAIN_WARNING_S = 5.0


class PddTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not typed here
    """The agent's landing store as a tier of vLLM's KV offloading."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        *,
        offloading_spec: PddOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        agent_socket: str,
        hash_algo: str,
        hash_seed: str,
        chunk_tokens: int,
        backpressure_detector: Any = None,
    ) -> None:
        """The link to the agent is being made; until then every lookup misses and every job fails.

        Args:
            offloading_spec: The spec this tier belongs to.
            primary_kv_view: The primary tier's rows; held for vLLM's sake, never read here.
            tier_type: Name of this class in the configuration.
            agent_socket: Where the agent listens.
            hash_algo: Block hash algorithm of all engines.
            hash_seed: ``PYTHONHASHSEED`` of all engines.
            chunk_tokens: Tokens per chunk of all engines.
            backpressure_detector: Refused: back pressure drops stores.

        Raises:
            ConfigurationError: If the engine's chunks are not of that size, or back pressure is on.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        config = offloading_spec.config
        shape: CacheShape = offloading_spec.shape
        own_tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
        if own_tokens != chunk_tokens:
            raise ConfigurationError(
                f"this engine's chunk has {own_tokens} tokens, the others' {chunk_tokens}"
            )
        if backpressure_detector is not None:
            raise ConfigurationError("back pressure drops chunks and leaves holes in prefixes: remove it")
        self._spec = offloading_spec
        self._engine_id = str(config.engine_id)
        self._chunk_tokens = chunk_tokens
        self._order = ChunkOrder([group.window_chunks(chunk_tokens) for group in shape.groups])
        # A key ends with vLLM's number of its group; groups that are not offloaded have numbers too.
        self._group_of = {group.group_id: i for i, group in enumerate(config.groups)}
        self._orders: dict[str, TransferOrder] = {}
        self._hash_algo, self._hash_seed = hash_algo, hash_seed
        self._bound = PromotionBound(offloading_spec.num_chunks)
        self._num_bounded: dict[str, int] = {}
        self._reported: tuple[bool, int] | None = None
        self._model_digest: str | None = None
        self._num_slots = offloading_spec.num_chunks
        region = offloading_spec._scheduler_mmap  # noqa: SLF001  # set by get_manager just before tiers are made
        assert region is not None
        self._link = AgentLink(Path(agent_socket), hello=self._hello, primary_fd=region.fd, logger=logger)
        self._link.start()

    # Requests.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """The agent knows of the request's transfer order, if it has one.

        With an order, vLLM is asked to hand over all chunks of the prompt, also those it has cached already.
        """
        try:
            order = parse_order(req_context.kv_transfer_params)
        except ValueError as error:
            logger.warning("request %s: transfer order ignored: %s", req_context.req_id, error)
            order = None
        if order is None:
            return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)
        self._orders[req_context.req_id] = order
        num_positions = order.prompt_tokens // self._chunk_tokens
        self._link.begin(
            BeginTransfer(
                request=req_context.req_id,
                transfer=order.transfer,
                targets=list(order.targets),
                prompt_tokens=order.prompt_tokens,
                num_chunks=self._order.num_chunks(num_positions),
                priority=order.priority,
                unmasked=order.unmasked,
                hold=order.hold,
            )
        )
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """The request holds no promise; if it had an order, the agent knows that no more chunks come.

        Its chunks count as used, also those the device cache served and the tiers were never asked for: a
        conversation that is hot on the device must not grow old in the store. The first chunk is touched
        last, so that tails are evicted before the prefixes they need.
        """
        self._bound.release((req_context.req_id,))
        self._orders.pop(req_context.req_id, None)
        self._link.finish(req_context.req_id)
        self._link.touch(keys_in_prefix_order(req_context)[::-1])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Requests that run now need no promise any more: what they hit is on the device."""
        self._bound.release(context.new_req_ids)

    # Chunks.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the store holds the chunk and there is room to promote it; never waits."""
        if not self._link.holds(key):
            return LookupResult.MISS
        position = req_context.get_offload_key_position(key)
        decision = self._bound.ask(
            req_context.req_id,
            key,
            chunk_number=1 if position is None else self._order.num_chunks(position // self._chunk_tokens),
            now_s=time.monotonic(),
        )
        if decision.answer is Answer.PROMOTE:
            return LookupResult.HIT
        self._num_bounded[decision.reason] = self._num_bounded.get(decision.reason, 0) + 1
        return LookupResult.RETRY if decision.answer is Answer.RETRY else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """The store evicts these chunks last."""
        self._link.touch(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """The agent was asked to copy the job's slots into its store, in the order of the prompt."""
        context = job_metadata.req_context
        chunks = in_prefix_order(
            job_metadata.keys,
            [self._group_of[get_offload_group_idx(key)] for key in job_metadata.keys],
            job_metadata.chunk_ids.tolist(),
            [context.get_offload_key_position(key) for key in job_metadata.keys],
            chunk_tokens=self._chunk_tokens,
        )
        self._link.store(
            StoreChunks(
                job=job_metadata.job_id,
                request=context.req_id,
                keys=[chunk.key for chunk in chunks],
                slots=[chunk.slot for chunk in chunks],
                end_tokens=[self._place(context.req_id, chunk) * self._chunk_tokens for chunk in chunks],
            )
        )

    def _place(self, request: str, chunk: Chunk) -> int:
        """The chunk's place, from 1, in what the request's order sends; 0 if it is not part of that."""
        order = self._orders.get(request)
        if order is None:
            return 0
        position, num_positions = (n // self._chunk_tokens for n in (chunk.end_tokens, order.prompt_tokens))
        return self._order.place(chunk.group, position, num_positions) or 0

    def submit_load(self, job_metadata: TransferJob) -> None:
        """The agent was asked to fill the job's slots from its store."""
        slots = job_metadata.chunk_ids.tolist()
        self._link.load(LoadChunks(job=job_metadata.job_id, keys=list(job_metadata.keys), slots=slots))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that no longer touch the primary tier, since the last call."""
        return [
            JobResult(job_id=job.job, success=job.ok, successful_keys=job.loaded)
            for job in self._link.take_finished()
        ]

    def drain_jobs(self) -> None:
        """No job touches the primary tier any more. vLLM calls this between steps, and wants it to wait."""
        while not self._link.wait_for_jobs(DRAIN_WARNING_S):
            logger.warning("still waiting for the agent to finish copying")

    def shutdown(self) -> None:
        """The link is closed and nothing here refers to the primary tier."""
        self._link.close()
        self._primary_kv_view = memoryview(b"")

    # Metrics.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """What ``get_stats`` reports, for vLLM's ``/metrics``."""
        return {
            CONNECTED: OffloadingGaugeMetadata(documentation="Whether this engine's agent is connected."),
            MIRROR_CHUNKS: OffloadingGaugeMetadata(documentation="Chunks known to be in the agent's store."),
            LOOKUPS_BOUNDED: OffloadingCounterMetadata(
                documentation="Lookups of chunks in the store that were not answered HIT, by reason.",
                labelnames=("reason",),
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call."""
        state = (self._link.connected, self._link.num_keys)
        if state == self._reported and not self._num_bounded:
            return None
        stats = OffloadingConnectorStats()
        stats.set_gauge(CONNECTED, int(state[0]))
        stats.set_gauge(MIRROR_CHUNKS, state[1])
        for reason, count in self._num_bounded.items():
            stats.increase_counter(LOOKUPS_BOUNDED, count, (reason,))
        self._num_bounded.clear()
        self._reported = state
        return stats

    # Called in the link's thread.

    def _hello(self) -> Hello | None:
        """This engine's first message; None until vLLM has hashed the root of all blocks."""
        root = root_block_hash()
        if root is None:
            return None
        if root != expected_root_hash(self._hash_algo, self._hash_seed):
            raise ConfigurationError(
                f"this engine does not hash blocks with {self._hash_algo} and seed {self._hash_seed!r}: "
                f"start it with --prefix-caching-hash-algo {self._hash_algo}, as all the others"
            )
        spec, config = self._spec, self._spec.config
        if self._model_digest is None:
            self._model_digest = model_digest(config.model.name)
        chunk_bytes = spec.chunk_bytes
        return Hello(
            version=LOCAL_VERSION,
            engine_id=self._engine_id,
            fingerprint=dict(
                make_fingerprint(
                    model=self._model_digest,
                    dtype=config.model.dtype,
                    kv_layout=str(config.kv_cache_layout),
                    kv_groups=str(spec.shape),
                    block_tokens=config.groups[0].tokens_per_block,
                    chunk_tokens=self._chunk_tokens,
                    chunk_bytes=chunk_bytes,
                    hash_name=f"{self._hash_algo}/{self._hash_seed}",
                    parallelism=spec.parallelism,
                    platform=spec.platform,
                )
            ),
            chunk_bytes=chunk_bytes,
            chunk_tokens=self._chunk_tokens,
            primary_row_bytes=spec.kv_bytes_per_chunk,
            num_primary_slots=self._num_slots,
            sampler=str(config.extra_config.get(SAMPLER_KEY, "")),
        )
