"""What the fake engines say and the clients expect: one known sequence of tokens, as ready-made bytes.

Token ``i`` of every answer is the same word, so that a lost, repeated or reordered token shows in the text.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models

MODEL = "bench"
NUM_WORDS = 4096
PROMPT_TOKENS = 200
CHUNK_TOKENS = 32
CHUNK_BYTES = 32 * 46_080
DONE = b"e\r\ndata: [DONE]\n\n\r\n"


def word(position: int) -> str:
    """The text of token ``position`` of an answer."""
    return f" w{token_id(position)}"


def token_id(position: int) -> int:
    """The id of token ``position`` of an answer."""
    return position % NUM_WORDS


def write_tokenizer(folder: Path) -> None:
    """``tokenizer.json`` is in the folder: a byte-level vocabulary with one token a word."""
    vocab = {f"Ġw{number}": number for number in range(NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=f"Ġw{NUM_WORDS - 1}"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def chunked(data: bytes) -> bytes:
    """The data as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event as one HTTP chunk, as uvicorn writes it."""
    return chunked(b"data: " + msgspec.json.encode(payload) + b"\n\n")


@lru_cache(maxsize=2 * NUM_WORDS)
def generate_frame(position: int, *, last: bool) -> bytes:
    """vLLM's event of a token-in, token-out stream.

    Source:
        vllm/entrypoints/scale_out/token_in_token_out/protocol.py@0.32.0 (``GenerateTokensStreamResponse``).
    """
    choice = {
        "index": 0,
        "finish_reason": "length" if last else None,
        "stop_reason": None,
        "token_ids": [token_id(position)],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None,
    }
    return event(
        {
            "request_id": "generate-tokens-bench-0123456789abcdef0123456789abcdef",
            "usage": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "output_mode": "tokens",
            "choices": [choice],
        }
    )


@lru_cache(maxsize=2 * NUM_WORDS)
def chat_frame(position: int, *, last: bool) -> bytes:
    """vLLM's event of a chat stream."""
    choice = {
        "index": 0,
        "delta": {"content": word(position)},
        "logprobs": None,
        "finish_reason": "length" if last else None,
        "token_ids": None,
    }
    return event(
        {
            "id": "chatcmpl-bench-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": MODEL,
            "choices": [choice],
        }
    )


def usage(num_tokens: int, *, cached: bool) -> dict[str, Any]:
    """Token counts of an answer; a decode engine has found what landed, a prefill engine nothing."""
    cached_tokens = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS if cached else 0
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": PROMPT_TOKENS + num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
