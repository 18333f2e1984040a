"""vLLM's tool call and reasoning parsers over answers that no single engine made.

The only module of this package that knows vLLM. It loads the tokenizer, no model and no device.

Source:
    vllm/entrypoints/openai/chat_completion/serving.py (``chat_completion_stream_generator``,
    ``chat_completion_full_generator``), vllm/parser/{abstract_parser,parser_manager}.py@0.32.0.
"""

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.parser import ParserManager
from vllm.parser.parser_manager import HF_PARSER
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from pdd.config.schema import ModelConfig
from pdd.core.errors import ConfigurationError
from pdd.parse.names import check_names


class Answer:
    """One answer; feed its pieces in order, or its whole text once."""

    def __init__(self, parser: Any, request: ChatCompletionRequest, prompt_ids: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []

    def feed(self, text: str, ids: list[int], *, finished: bool) -> dict[str, Any] | None:
        """The delta that the piece adds; None if the parser waits for more."""
        self._ids += ids
        delta = self._parser.parse_delta(
            text, ids, self._request, prompt_token_ids=self._prompt_ids, finished=finished
        )
        if delta is None:
            return None
        delta = maybe_filter_parallel_tool_calls(delta, self._request)
        return dict(delta.model_dump(exclude_none=True))

    def whole(self, text: str, ids: list[int]) -> dict[str, Any]:
        """The message's content, reasoning and tool calls."""
        self._ids = ids
        self._parser.set_prompt_token_ids(self._prompt_ids)
        reasoning, content, calls = self._parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=ids
        )
        forced = self._request.tool_choice not in (None, "none", "auto")
        made = maybe_filter_parallel_tool_calls(list(calls or ()), self._request)
        return {
            "content": content or "" if forced else content,
            "reasoning": reasoning if self._request.include_reasoning else None,
            "tool_calls": [
                {
                    "id": call.id or make_tool_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in made
            ],
        }

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far were reasoning."""
        return int(self._parser.count_reasoning_tokens(self._ids))


class Parsers:
    """The parsers of one model.

    Args:
        model: Where its tokenizer is, and vLLM's names of its parsers.
        source: The configuration, in messages.

    Raises:
        ConfigurationError: If vLLM has none of that name, or it does not fit the tokenizer.
    """

    def __init__(self, model: ModelConfig, *, source: str) -> None:
        check_names(
            model,
            tool_call_parsers=sorted({*ToolParserManager.list_registered(), HF_PARSER}),
            reasoning_parsers=sorted({*ReasoningParserManager.list_registered(), HF_PARSER}),
            source=source,
        )
        try:
            self._tokenizer = get_tokenizer(model.path)
        except Exception as error:  # vLLM raises what it likes
            raise ConfigurationError(f"{source}: model.path: {error}") from error
        try:
            self._class = ParserManager.get_parser(
                tool_parser_name=model.tool_call_parser,
                reasoning_parser_name=model.reasoning_parser,
                enable_auto_tools=model.tool_call_parser is not None,
                model_name=model.path,
                tokenizer=self._tokenizer,
            )
        except Exception as error:
            keys = "model.tool_call_parser, model.reasoning_parser"
            raise ConfigurationError(f"{source}: {keys}: {error}") from error
        if self._class is None:
            raise ConfigurationError(
                f"{source}: neither model.tool_call_parser nor model.reasoning_parser is set"
            )

    def open(self, request: dict[str, Any], prompt_ids: list[int]) -> Answer:
        """A new answer to a client's request."""
        checked = ChatCompletionRequest.model_validate(request)
        template = checked.build_chat_params(None, "auto").with_defaults(None).chat_template_kwargs
        parser = self._class(self._tokenizer, checked.tools, chat_template_kwargs=template)
        return Answer(parser, checked, prompt_ids)
