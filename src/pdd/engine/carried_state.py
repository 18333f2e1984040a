"""Penalties and seeds that go on where another engine stopped: logits processors of vLLM's engines.

vLLM takes the tokens another engine made for prompt. Presence and frequency penalties would forget them, and
a seed would be drawn from its beginning again. With these processors the n-th token of an answer is the one
that a single engine without them would have drawn.

vLLM has two model runners with an interface each. V1 (the CPU backend, or ``VLLM_USE_V2_MODEL_RUNNER=0``)
draws one number after the other from a generator per request: ``V1Draws`` winds one forward. V2 (vLLM's
choice on GPUs) keys every draw by seed and position, so only penalties need help there.

Source:
    vllm/v1/sample/sampler.py (order of the stages), v1/sample/logits_processor/interface.py,
    v1/worker/gpu_model_runner.py (``_bookkeeping_sync``), v1/worker/gpu/sample/logits_processor/interface.py,
    v1/worker/gpu/sample/gumbel.py@0.32.0.
"""

from dataclasses import dataclass, field

import torch

from pdd.core.errors import ConfigurationError
from pdd.engine.vllm_api import (
    BatchUpdate,
    LogitsContext,
    LogitsProcRequestState,
    SamplingParams,
    TopKTopPSampler,
    V1LogitsProcessor,
    V2LogitsProcessor,
    VllmConfig,
    apply_penalties,
    process_dict_updates,
)
from pdd.wire.carried import Carried, read_carried

_GREEDY_BELOW = 1e-5
"""vLLM's own bound on the temperature."""


def penalise(
    row: torch.Tensor, *, prompt: torch.Tensor, output: torch.Tensor, carried: Carried
) -> torch.Tensor:
    """One request's logits, shape ``[1, vocab]``, with vLLM's own penalties for this prompt and answer."""

    def one(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float32, device=row.device)

    return apply_penalties(
        row,
        prompt.view(1, -1),
        output.view(1, -1),
        one(carried.presence_penalty),
        one(carried.frequency_penalty),
        one(carried.repetition_penalty),
    )


@dataclass(slots=True, kw_only=True)
class PenalisedRequest:
    """A request whose penalties are carried; ``output_ids`` is the engine's own growing list."""

    carried: Carried
    prompt: torch.Tensor
    before: list[int]
    output_ids: list[int]


class V1Penalties(V1LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed here
    """Presence and frequency penalties over the whole answer, for the V1 runner.

    It runs where vLLM's penalties would: after logit bias and before the temperature.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002  # vLLM's signature
        self._device = device
        self._requests: dict[int, PenalisedRequest] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """What is carried can be read."""
        read_carried(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Penalties change what greedy sampling takes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The batch has changed."""
        process_dict_updates(self._requests, batch_update, self._new)

    def _new(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> PenalisedRequest | None:
        carried = read_carried(params.extra_args)
        if carried is None or not carried.penalises or prompt_ids is None:
            return None
        prompt = torch.tensor(prompt_ids[: carried.prompt_tokens], dtype=torch.int64, device=self._device)
        before = list(prompt_ids[carried.prompt_tokens :])
        return PenalisedRequest(carried=carried, prompt=prompt, before=before, output_ids=output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Penalise the rows of carried requests in place."""
        for index, request in self._requests.items():
            ids = torch.tensor(request.before + request.output_ids, dtype=torch.int64, device=self._device)
            # A token that is still on its way from the last step is -1; vLLM's own code maps it so, too.
            ids.masked_fill_(ids < 0, logits.shape[1])
            row = logits[index : index + 1]
            row.copy_(penalise(row, prompt=request.prompt, output=ids, carried=request.carried))
        return logits


@dataclass(slots=True, kw_only=True)
class SeededRequest:
    """One request of the batch that draws from a seed; ``num_drawn`` counts what its generator gave."""

    seed: int
    top_k: int
    top_p: float
    num_before: int
    output_ids: list[int]
    generator: torch.Generator
    num_drawn: int = field(default=-1)


class V1Draws(V1LogitsProcessor):  # type: ignore[misc]
    """Seeded draws by position, for the V1 runner.

    Runs after the temperature and ``min_p``, takes the token vLLM's own sampler would take with a generator
    that has made all draws of the answer so far, and leaves no other in the logits.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        """The processor is ready.

        Raises:
            ConfigurationError: If log probabilities are to be taken behind it.
        """
        mode = str(vllm_config.model_config.logprobs_mode)
        if mode.startswith("processed"):
            raise ConfigurationError(f"--logprobs-mode {mode}: seeded requests cannot be continued with it")
        self._device = device
        self._requests: dict[int, SeededRequest] = {}
        self._sampler = TopKTopPSampler()

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """What is carried can be read, and vLLM makes no generator of its own for a carried seed.

        On the CPU backend that one ends the engine when a prompt takes more than one step: its place is
        set back (``_bookkeeping_sync``), and a generator of the CPU has none.
        """
        carried = read_carried(sampling_params.extra_args)
        if carried is not None and carried.seed is not None:
            sampling_params.seed = None

    def is_argmax_invariant(self) -> bool:
        """Greedy requests are not concerned."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The batch has changed."""
        process_dict_updates(self._requests, batch_update, self._new)

    def _new(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> SeededRequest | None:
        carried = read_carried(params.extra_args)
        if carried is None or carried.seed is None or params.temperature < _GREEDY_BELOW:
            return None
        return SeededRequest(
            seed=carried.seed,
            top_k=params.top_k,
            top_p=params.top_p,
            num_before=len(prompt_ids or ()) - carried.prompt_tokens,
            output_ids=output_ids,
            generator=torch.Generator(device=self._device),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token in the rows of seeded requests."""
        for index, request in self._requests.items():
            row = logits[index : index + 1]
            token = self._draw(row.clone(), request)
            row.fill_(-float("inf")).scatter_(1, token.view(1, 1), 0.0)
        return logits

    def _draw(self, row: torch.Tensor, request: SeededRequest) -> torch.Tensor:
        vocab = row.shape[1]
        position = request.num_before + len(request.output_ids)
        if request.num_drawn != position:  # new here, or a draw was for a step that ended inside the prompt
            request.generator.manual_seed(request.seed)
            wind(request.generator, draws=position, vocab=vocab, device=self._device)
        request.num_drawn = position + 1
        top_k = top_p = None
        if 0 < request.top_k < vocab:
            top_k = torch.tensor([request.top_k], dtype=torch.int32, device=self._device)
        if request.top_p < 1:
            top_p = torch.tensor([request.top_p], dtype=torch.float32, device=self._device)
        token, _ = self._sampler.forward(row, {0: request.generator}, top_k, top_p)
        return token.long()


def wind(generator: torch.Generator, *, draws: int, vocab: int, device: torch.device) -> None:
    """The generator stands where vLLM's sampler leaves it after so many draws of one request.

    Source:
        vllm/v1/sample/ops/topk_topp_sampler.py@0.32.0 (``forward_cpu``, ``random_sample``).
    """
    if device.type == "cpu":
        torch.randint(0, 2**31, (draws,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocab, dtype=torch.float32, device=device)
    for _ in range(draws):
        noise.exponential_(generator=generator)


class V2Penalties(V2LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties over the whole answer, for the V2 runner.

    It runs after vLLM's own penalties, which carried requests leave at their neutral values.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:  # noqa: ARG002
        self._states = req_states
        self._requests: dict[int, Carried] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """What is carried can be read."""
        read_carried(sampling_params.extra_args)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A slot of the batch has a new request."""
        self._requests.pop(req_idx, None)
        carried = read_carried(sampling_params.extra_args)
        if carried is None or not carried.penalises:
            return False
        self._requests[req_idx] = carried
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Penalise the rows of carried requests in place."""
        if self._requests.keys().isdisjoint(ctx.idx_mapping_np.tolist()):
            return logits
        slots, positions = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()
        for index, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if (carried := self._requests.get(slot)) is None:
                continue
            tokens = self._states.all_token_ids.gpu[slot, : position + 1].long()
            row = logits[index : index + 1]
            prompt, output = tokens[: carried.prompt_tokens], tokens[carried.prompt_tokens :]
            row.copy_(penalise(row, prompt=prompt, output=output, carried=carried))
        return logits
