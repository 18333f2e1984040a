"""The schema of ``pdd.toml``: every key, its unit, its default and why.

Quantities people type (``"200mbit"``, ``"15ms"``, ``"2GiB"``) are parsed here; from here on everything is
bytes, seconds and bytes per second.
"""

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s, parse_size_bytes

Role = Literal["prefill", "relay", "main"]
PipelineChoice = Literal["auto", "p-md", "p-rld-md"]
HandoffChoice = Literal["auto", "one-shot", "catch-up"]
TlsMode = Literal["auto", "on", "off"]

Rate = Annotated[
    float, BeforeValidator(lambda v: parse_rate_bytes_per_s(v) if isinstance(v, str) else v), Field(gt=0)
]
Duration = Annotated[
    float, BeforeValidator(lambda v: parse_duration_s(v) if isinstance(v, str) else v), Field(ge=0)
]
Size = Annotated[
    int, BeforeValidator(lambda v: parse_size_bytes(v) if isinstance(v, str) else v), Field(gt=0)
]
SizeOrZero = Annotated[
    int, BeforeValidator(lambda v: parse_size_bytes(v) if isinstance(v, str) else v), Field(ge=0, lt=2**32)
]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):\d{1,5}$")]
"""``host:port``; IPv6 hosts in brackets."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """The model that all engines serve."""

    path: str
    """Folder or Hugging Face name, as for ``vllm serve``."""
    name: str
    """Name clients use in ``model``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Passed to vLLM. A float32 checkpoint is loaded as bfloat16 unless this says float32."""
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    """Tokens of prompt and answer together; default: the model's own limit."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser of tool calls, as ``hermes``; default: ``tools`` are refused."""
    reasoning_parser: str | None = None
    """vLLM's name of the parser of reasoning, as ``deepseek_r1``; default: reasoning is part of the text."""

    @property
    def parses_answers(self) -> bool:
        """Whether the router needs the parse process."""
        return self.tool_call_parser is not None or self.reasoning_parser is not None


class KvConfig(Section):
    """How KV is cut into the chunks that are stored and sent. Equal on all engines."""

    block_size_tokens: Annotated[int, Field(gt=0)] = 32
    """vLLM's block. On the CPU backend a multiple of 32."""
    blocks_per_chunk: Annotated[int, Field(gt=0)] = 1
    """Blocks per chunk. The main decode engine recomputes up to one chunk of every prompt."""
    hash_algo: Literal["sha256", "sha256_cbor"] = "sha256_cbor"
    """vLLM's prefix-caching hash; others are seeded per process, and no two engines would agree."""
    hash_seed: str = "0"
    """``PYTHONHASHSEED`` of all engines: it is part of every block hash."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.block_size_tokens * self.blocks_per_chunk


class EngineConfig(Section):
    """One vLLM engine and the agent beside it."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Short name, also the peer id on the wire and the label in metrics."""
    role: Role
    """``prefill`` (P) computes prompts; ``relay`` (RLD) decodes beside it until ``main`` (MD) takes over."""
    site: str = "a"
    """Datacenter. Engines of one site share the fast link."""
    host: str = "127.0.0.1"
    """Address the engine's API and the agent bind to."""
    port: Port
    """Port of the engine's API (``vllm serve --port``)."""
    data_port: Port
    """Port where the agent takes KV from its peers."""
    control_port: Port
    """Port of the agent's control API."""
    url: str = ""
    """How the router reaches the engine's API; default ``http://host:port``."""
    control_url: str = ""
    """How the router reaches the agent's control API; default ``http://host:control_port``."""
    events_port: Annotated[int, Field(ge=1, le=65534)] | None = None
    """Where the engine says what its caches hold; the port after it repeats what a router missed. Both carry
    prompts in clear. Default: a Unix socket in ``run_dir``, for a router on the same host."""
    advertise: Address | None = None
    """``host:port`` other agents dial for KV; default ``host:data_port``. Set it behind NAT or a relay."""
    store_bytes: Size = 4 * 2**30
    """Host memory of the agent's landing store: the decode-side cache that outlives the engine."""
    primary_bytes: Size = 1 * 2**30
    """Host memory of vLLM's primary tier, the gateway to the device; at least twice the longest prompt."""
    max_num_seqs: Annotated[int, Field(gt=0)] | None = None
    """Requests decoded at once; default: vLLM's. The router takes it as the engine's capacity."""
    vllm_args: tuple[str, ...] = ()
    """More flags for ``vllm serve``, as they are."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment for the engine."""

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        """Only its own: which other engines are on the same machine, the file does not say."""
        keys: dict[int, str] = {}
        for key, port in self.ports.items():
            if (other := keys.setdefault(port, key)) != key:
                raise ValueError(f"port {port} of {self.id} is asked for twice, by {other} and by {key}")
        return self

    @model_validator(mode="after")
    def _fill_addresses(self) -> Self:
        host = f"[{self.host}]" if ":" in self.host else self.host
        for field, value in (
            ("url", self.url or f"http://{host}:{self.port}"),
            ("control_url", self.control_url or f"http://{host}:{self.control_port}"),
            ("advertise", self.advertise or f"{host}:{self.data_port}"),
        ):
            object.__setattr__(self, field, value)
        return self

    @property
    def ports(self) -> dict[str, int]:
        """Every port that the engine or its agent listens at, by its key."""
        ports = {"port": self.port, "data_port": self.data_port, "control_port": self.control_port}
        if self.events_port is not None:
            ports |= {"events_port": self.events_port, "events_port + 1": self.events_port + 1}
        return ports

    @property
    def data_address(self) -> str:
        """``host:port`` other agents dial for KV."""
        assert self.advertise is not None
        return self.advertise


class AgentConfig(Section):
    """What all agents share."""

    streams: Annotated[int, Field(ge=1, le=64)] = 4
    """Data connections per peer. One TCP flow does not fill a long line; 4-16 do."""
    piece_bytes: Size = 1 * 2**20
    """Most payload in one DATA frame; 1-4 MiB keep both the frame count and the head-of-line wait small."""
    unasked_bytes: SizeOrZero = 4 * 2**20
    """Most KV sent to a peer, and taken, before it was asked for; 4 MiB fill 1 Gb/s for 30 ms; 0: off."""
    fast_transport: Literal["tcp", "nixl"] = "tcp"
    """What carries KV to engines that only prefill engines of their own site push to; ``nixl``: in clear."""
    codec: Literal["off", "on", "auto"] = "off"
    """Lossless coding of bf16 KV on the wire, if both sides allow it; ``auto``: where the line is slower."""
    lease_s: Duration = 60.0
    """How long landed chunks are kept for a handoff that nobody releases."""
    stall_timeout_s: Duration = 30.0
    """A transfer without progress for this long has failed."""
    connect_timeout_s: Duration = 5.0
    """Bound on connecting to a peer."""
    max_rate: Rate | None = None
    """Most an agent sends on one link, e.g. ``"8gbit"``; default: what the line takes."""


class TlsConfig(Section):
    """TLS between agents. KV is the prompt, so it is on wherever it can leave the host."""

    mode: TlsMode = "auto"
    """``auto``: for engines whose KV port is not on loopback; ``on``: for all; ``off``: none, in clear."""
    cert: str = "certs/{engine}.crt"
    """Own certificate, PEM; ``{engine}`` stands for the engine's id. Paths are relative to this file."""
    key: str = "certs/{engine}.key"
    """The certificate's private key, PEM, not encrypted."""
    ca: str = "certs/ca.crt"
    """The CA that all engines' certificates come from, PEM; several during a change of CA."""


class ForwardConfig(Section):
    """One address the emulated line listens at, and where it leads."""

    listen: Address
    """Where clients connect instead of to the target."""
    target: Address
    """Where their bytes go, at the other end of the line."""


class LinkConfig(Section):
    """One emulated line between two sites; all its forwards share the rate, each direction apart."""

    name: str = "wan"
    """In messages and counters."""
    rate: Rate
    """Line rate, e.g. ``"200mbit"``."""
    delay: Duration
    """One-way delay, e.g. ``"15ms"``; the round trip is twice that."""
    forwards: Annotated[tuple[ForwardConfig, ...], Field(min_length=1)]
    control: Address | None = None
    """Where the emulator takes changes and tells its counters; off by default."""


class PolicyConfig(Section):
    """Parameters of the router's decisions; each policy's module says how they are used."""

    second_token_slo_s: Duration = 0.5
    """How long after the first token the second should follow. A WAN time within it needs no relay."""
    assumed_wan_rate: Rate = 1.25e9
    """Line rate believed until the agents have measured one."""
    assumed_wan_rtt_s: Duration = 0.03
    """Round trip believed until the agents have measured one."""
    outlier_margin_ratio: Annotated[float, Field(ge=0, le=1)] = 0.8
    """An answer that RLD is predicted to finish in this part of the WAN time is not sent to MD; 0: never."""
    outlier_returning_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A prompt known by this share to some engine is a next turn: what crosses now is saved later."""
    assumed_relay_itl_s: Duration = 0.03
    """Time for one token on RLD believed until it was measured."""
    affinity_weight_ratio: Annotated[float, Field(ge=0)] = 0.5
    """How much fuller than an engine that lacks the whole prompt one that holds it may be and still get it;
    0: by load alone."""
    one_shot_max_gap_tokens: Annotated[int, Field(ge=0)] = 8
    """Up to so many eager tokens the handoff is always one-shot: recomputing them costs less than a round."""
    catch_up_gap_tokens: Annotated[int, Field(ge=0)] = 32
    """Catch-up stops RLD when MD has at most so many tokens left to compute. An accelerator's step takes no
    longer for them than for one: on an H20, the weakest decode chip meant, reading the weights takes longer
    than the arithmetic of 37 tokens."""
    catch_up_max_rounds: Annotated[int, Field(ge=1)] = 4
    """Bound on catch-up rounds, whatever the gap."""
    busy_ratio: Annotated[float, Field(gt=0, le=1)] = 0.75
    """RLD load (running / capacity) from which auto mode frees it by one-shot."""
    idle_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """RLD load below which auto mode goes back to catch-up."""


class RouterConfig(Section):
    """The OpenAI endpoint."""

    host: str = "127.0.0.1"
    """Address the endpoint binds to."""
    port: Port = 8000
    """Port of the endpoint."""
    pipeline: PipelineChoice = "auto"
    """Force one pipeline, for tests and comparisons."""
    handoff: HandoffChoice = "auto"
    """Force one handoff mode."""
    api_keys: tuple[str, ...] = ()
    """If any, clients must send one as ``Authorization: Bearer``. Better set by ``PDD_ROUTER__API_KEYS``."""
    max_body_bytes: Size = 32 * 2**20
    """Larger request bodies get 413."""
    request_timeout_s: Duration = 600.0
    """Deadline of one request, from its arrival to its last byte."""
    engine_idle_timeout_s: Annotated[Duration, Field(gt=0)] = 60.0
    """An engine that is silent for so long in the middle of an answer has failed; another one continues."""
    connect_timeout_s: Annotated[Duration, Field(gt=0)] = 3.0
    """An engine or agent that does not take a connection within this is down. Across the WAN it takes 0.1 s,
    one lost packet 1 s more and two 3 s; more is for hosts whose engines get no processor for seconds."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 4096
    """Requests served at once; more wait. Their streams cost about 100 KB each."""
    queue_size: Annotated[int, Field(ge=0)] = 1024
    """Requests that wait for their turn; beyond that the least urgent gets 429."""
    breaker_failures: Annotated[int, Field(ge=1)] = 3
    """Failures in a row after which an engine is asked only when no other is left."""
    breaker_open_s: Duration = 10.0
    """How long that lasts; then one request at a time tries the engine."""
    decision_log: str = ""
    """File that every decision and its snapshot is written to, one JSON object a line; none if empty."""
    keep_alive_interval_s: Duration = 15.0
    """Streams that are silent for so long get a comment line, so that proxies keep them open; 0 is off."""
    max_believed_blocks: Annotated[int, Field(ge=1)] = 250_000
    """KV blocks remembered of each engine's device, and of its store; the oldest are forgotten. That is 8
    million tokens or 368 GB of KV at 46 kB a token, and costs at most 120 MB an index."""
    transfer_timeout_s: Duration = 120.0
    """How long the router waits for KV to land before it goes on without."""
    recovery_timeout_s: Duration = 30.0
    """How long an answer that has begun waits for an engine when none is left; vLLM restarts in 30-70 s."""
    drain_timeout_s: Duration = 30.0
    """How long open requests may still run after SIGTERM."""
    fast_path: bool = True
    """Whether tokens in the middle of an answer go past Python, by a native thread; false costs CPU only."""


class PddConfig(Section):
    """The whole file."""

    run_dir: str = ""
    """Folder of sockets and logs; default ``$XDG_RUNTIME_DIR/pdd`` or ``/tmp/pdd-<uid>``."""
    model: ModelConfig
    kv: KvConfig = KvConfig()
    agent: AgentConfig = AgentConfig()
    tls: TlsConfig = TlsConfig()
    router: RouterConfig = RouterConfig()
    policy: PolicyConfig = PolicyConfig()
    engines: Annotated[tuple[EngineConfig, ...], Field(min_length=1)]
    links: tuple[LinkConfig, ...] = ()

    @model_validator(mode="after")
    def _check_fleet(self) -> Self:
        ids = [engine.id for engine in self.engines]
        if repeated := {engine_id for engine_id in ids if ids.count(engine_id) > 1}:
            raise ValueError(f"engine ids must be unique, but {', '.join(sorted(repeated))} occurs twice")
        if self.tls.mode == "on" and self.agent.fast_transport == "nixl":
            raise ValueError('agent.fast_transport "nixl" sends KV in clear, but tls.mode is "on"')
        if self.policy.idle_ratio > self.policy.busy_ratio:
            raise ValueError("policy.idle_ratio must not exceed policy.busy_ratio")
        return self

    def engine(self, engine_id: str) -> EngineConfig:
        """The engine of that id.

        Raises:
            KeyError: If there is none.
        """
        for engine in self.engines:
            if engine.id == engine_id:
                return engine
        raise KeyError(engine_id)

    def uses_tls(self, engine: EngineConfig) -> bool:
        """Whether KV to this engine is encrypted; all agents read the same file and so agree.

        An engine counts as on loopback only if it both listens there and is dialled there.
        """
        if self.tls.mode != "auto":
            return self.tls.mode == "on"
        dialled_host = engine.data_address.rpartition(":")[0]
        return not (is_loopback(engine.host) and is_loopback(dialled_host))

    def uses_nixl(self, engine: EngineConfig) -> bool:
        """Whether KV to it goes over NIXL: a port speaks one transport, so all who push must be near."""
        senders = [other for other in self.engines_of("prefill") if other.id != engine.id]
        is_near = bool(senders) and all(sender.site == engine.site for sender in senders)
        return self.agent.fast_transport == "nixl" and engine.role != "prefill" and is_near

    @property
    def carries_sampler_state(self) -> bool:
        """Whether penalties and seeds go on from one engine to the next, by PDD's logits processors.

        vLLM takes none with speculative decoding, and an operator's own ones replace them.
        """
        flags = {arg.partition("=")[0] for engine in self.engines for arg in engine.vllm_args}
        return not flags & {"--speculative-config", "-sc", "--logits-processors"}

    def engines_of(self, role: Role) -> tuple[EngineConfig, ...]:
        """All engines of a role, in the file's order."""
        return tuple(engine for engine in self.engines if engine.role == role)


def is_loopback(host: str) -> bool:
    """Whether what is sent to the host cannot leave this one; a name other than ``localhost`` might."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"
