"""Whether the parsers that the configuration names exist; knows no vLLM, so that it can be asked without."""

from collections.abc import Sequence

from pdd.config.schema import ModelConfig
from pdd.core.errors import ConfigurationError


def check_names(
    model: ModelConfig, *, tool_call_parsers: Sequence[str], reasoning_parsers: Sequence[str], source: str
) -> None:
    """Every parser that the model needs is one of vLLM's.

    Args:
        model: Names them.
        tool_call_parsers: What vLLM has.
        reasoning_parsers: Likewise.
        source: The configuration, in messages.

    Raises:
        ConfigurationError: Naming the file, each wrong key and what it could be.
    """
    keys = (
        ("tool_call_parser", model.tool_call_parser, tool_call_parsers),
        ("reasoning_parser", model.reasoning_parser, reasoning_parsers),
    )
    problems = [
        f"{source}: model.{key}: vLLM has no parser {name!r}; it has {', '.join(known)}"
        for key, name, known in keys
        if name is not None and name not in known
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))
