"""Fake engines and agents in one process: P, RLD and MD at realistic pace, or as fast as they are read.

``python -m pdd.cli.router_bench.fleet '{"engines": {"p0": [port, control port], ...}}'`` serves until it is
told to stop. A request says itself how it is to be answered: ``max_tokens`` tokens, and with ``min_p`` (which
nothing else uses here) as the seconds between two of them; 0 is as fast as possible.
"""

import asyncio
import sys
from typing import Any

import msgspec
import uvloop

from pdd.cli.router_bench import frames
from pdd.cli.router_bench.http import STREAM_HEAD, ServerConnection

WAN_LANDING_S = 0.5
"""KV reaches MD after RLD has made a token or two, so that every request is handed over."""
DEFAULT_MAX_TOKENS = 16
BURST_TOKENS = 16
"""Of one stream between two looks at the others, when nothing paces it."""
KV_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_block_ids": [0],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


class Stream:
    """One answer in progress."""

    def __init__(self, connection: ServerConnection, *, position: int, end: int, api: str) -> None:
        self.connection = connection
        self._position = position
        self._end = end
        self._frame = frames.chat_frame if api == "chat" else frames.generate_frame
        self._api = api
        self._begun = position

    def step(self) -> bool:
        """Send one token; true if it was the last."""
        last = self._position + 1 >= self._end
        data = self._frame(self._position, last=last)
        self._position += 1
        if last:
            count = self._position - self._begun
            if self._api == "generate":
                data += frames.event({"choices": [], "usage": frames.usage(count, cached=True)})
            data += frames.DONE + b"0\r\n\r\n"
        self.connection.transport.write(data)
        return last


class Pacer:
    """Gives each of its streams one token per tick, all at once, as an engine's step does.

    Args:
        interval_s: Between ticks; 0 sends bursts for as long as a stream takes them.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._streams: dict[ServerConnection, Stream] = {}
        self._loop = asyncio.get_running_loop()
        self._next_s = 0.0

    def add(self, stream: Stream) -> None:
        """The stream's first token leaves at once."""
        if stream.step():
            return
        idle = not self._streams
        self._streams[stream.connection] = stream
        if idle:
            self._next_s = self._loop.time() + self._interval_s
            self._loop.call_at(self._next_s, self._tick)

    def remove(self, connection: ServerConnection) -> None:
        """Nothing more is sent there."""
        self._streams.pop(connection, None)

    def _tick(self) -> None:
        burst = 1 if self._interval_s else BURST_TOKENS
        for connection, stream in list(self._streams.items()):
            for _ in range(burst):
                if not connection.writable:
                    break
                if stream.step():
                    self.remove(connection)
                    break
        if self._streams:
            self._next_s = max(self._next_s + self._interval_s, self._loop.time())
            self._loop.call_at(self._next_s, self._tick)


class Engine:
    """One fake engine: what PDD asks of it, and what vllm-router asks of it."""

    def __init__(self, engine_id: str, agents: "dict[str, Agent]") -> None:
        self._id = engine_id
        self._agents = agents
        self._pacers: dict[float, Pacer] = {}
        self._prompt = [frames.NUM_WORDS - 1] * frames.PROMPT_TOKENS

    def handle(self, connection: ServerConnection, path: str, body: dict[str, Any]) -> None:
        """Answer one request."""
        if path == "/v1/models":
            card = {"id": frames.MODEL, "object": "model", "max_model_len": 1_000_000}
            connection.answer({"object": "list", "data": [card]})
        elif path == "/v1/chat/completions/render":
            connection.answer(self._rendered(body))
        elif path == "/inference/v1/generate":
            self._generate(connection, body)
        elif path == "/v1/chat/completions":
            self._chat(connection, body)
        else:
            connection.answer({})

    def gone(self, connection: ServerConnection) -> None:
        """The client has left: nothing more is computed for it."""
        for pacer in self._pacers.values():
            pacer.remove(connection)

    def _rendered(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
        params = {"temperature": 0.0, "max_tokens": asked, "min_p": body.get("min_p", 0)}
        return {"token_ids": self._prompt, "sampling_params": params, "model": frames.MODEL}

    def _generate(self, connection: ServerConnection, body: dict[str, Any]) -> None:
        params = body["sampling_params"]
        position = len(body["token_ids"]) - frames.PROMPT_TOKENS
        if body.get("stream"):
            end = position + params["max_tokens"]
            self._stream(connection, position, end, float(params.get("min_p", 0)), "generate")
            return
        choice = {"index": 0, "finish_reason": "length", "token_ids": [frames.token_id(position)]}
        connection.answer(
            {"request_id": "bench", "choices": [choice], "usage": frames.usage(1, cached=False)}
        )
        order = (body.get("kv_transfer_params") or {}).get("pdd")
        if order is None:
            return
        for peer in order["targets"]:
            self._agents[self._id].land(order["transfer"], peer)

    def _chat(self, connection: ServerConnection, body: dict[str, Any]) -> None:
        if body.get("stream"):
            self._stream(connection, 0, body["max_tokens"], float(body.get("min_p", 0)), "chat")
            return
        choice = {
            "index": 0,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": frames.word(0)},
        }
        head = {"id": "chatcmpl-bench", "object": "chat.completion", "model": frames.MODEL}
        params = {**KV_PARAMS, **(body.get("kv_transfer_params") or {})}
        connection.answer(
            {
                **head,
                "choices": [choice],
                "usage": frames.usage(1, cached=False),
                "kv_transfer_params": params,
            }
        )

    def _stream(
        self, connection: ServerConnection, position: int, end: int, interval_s: float, api: str
    ) -> None:
        connection.transport.write(STREAM_HEAD)
        pacer = self._pacers.get(interval_s)
        if pacer is None:
            pacer = self._pacers[interval_s] = Pacer(interval_s)
        pacer.add(Stream(connection, position=position, end=end, api=api))


class Agent:
    """The control port of a fake agent: whatever is ordered lands."""

    def __init__(self, engine_id: str) -> None:
        self._id = engine_id
        self._seq = 0
        self._followers: list[ServerConnection] = []
        self._loop = asyncio.get_running_loop()

    def handle(self, connection: ServerConnection, path: str, body: dict[str, Any]) -> None:
        """Answer one request."""
        del body
        if path == "/v1/events":
            connection.transport.write(STREAM_HEAD)
            self._followers.append(connection)
            self._say({"event": "hello", "agent": self._id, "seq": self._seq})
        elif path == "/v1/state":
            state = {"engine_id": self._id, "engine_connected": True, "chunk_tokens": frames.CHUNK_TOKENS}
            connection.answer({**state, "sampler": "v1", "chunk_bytes": frames.CHUNK_BYTES, "peers": []})
        else:
            connection.answer({})

    def gone(self, connection: ServerConnection) -> None:
        """Somebody does not follow any more."""
        if connection in self._followers:
            self._followers.remove(connection)

    def land(self, transfer: str, peer: str) -> None:
        """The transfer lands soon: over the WAN later than beside us."""
        self._loop.call_later(WAN_LANDING_S if peer.startswith("md") else 0.0, self._landed, transfer, peer)

    def _landed(self, transfer: str, peer: str) -> None:
        self._seq += 1
        chunks = frames.PROMPT_TOKENS // frames.CHUNK_TOKENS
        counts = {"chunks": chunks, "chunks_sent": chunks, "tokens": chunks * frames.CHUNK_TOKENS}
        sizes = dict.fromkeys(("wan_bytes", "payload_bytes", "full_bytes"), chunks * frames.CHUNK_BYTES)
        times = {"elapsed_s": 0.01, "prefill_overlap_ratio": 0.0}
        self._say(
            {
                "event": "landed",
                "seq": self._seq,
                "transfer": transfer,
                "peer": peer,
                **counts,
                **sizes,
                **times,
            }
        )

    def _say(self, message: dict[str, Any]) -> None:
        line = frames.chunked(msgspec.json.encode(message) + b"\n")
        for follower in self._followers:
            follower.transport.write(line)


async def serve(engines: dict[str, list[int]]) -> None:
    """Serve all engines and agents until cancelled.

    Args:
        engines: API port and control port by engine id.
    """
    loop = asyncio.get_running_loop()
    agents = {engine_id: Agent(engine_id) for engine_id in engines}
    for engine_id, (port, control_port) in engines.items():
        engine, agent = Engine(engine_id, agents), agents[engine_id]
        await loop.create_server(lambda site=engine: ServerConnection(site), "127.0.0.1", port, backlog=4096)  # type: ignore[misc]
        await loop.create_server(lambda site=agent: ServerConnection(site), "127.0.0.1", control_port)  # type: ignore[misc]
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(msgspec.json.decode(sys.argv[1])))
