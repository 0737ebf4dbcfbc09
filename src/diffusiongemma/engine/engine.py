"""The engine: prompts in, a stream of events out. Everything else in this package consumes that stream."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diffusiongemma.checkpoint import load_model, pick_device, pick_dtype, resolve
from diffusiongemma.config import PRESETS, ModelConfig
from diffusiongemma.diffusion import Draws
from diffusiongemma.engine.candidates import drain
from diffusiongemma.engine.edit import EditResult, Span, edit_stream
from diffusiongemma.engine.events import Commit, End, Event, Result, TokenLogprob
from diffusiongemma.engine.fast import choose_runner
from diffusiongemma.engine.fill import FillResult, Template, fill_stream
from diffusiongemma.engine.form import form_stream
from diffusiongemma.engine.infill import InfillResult, infill_stream
from diffusiongemma.engine.output import OutputText
from diffusiongemma.engine.params import HoleSettings, Mode, SamplingParams, released_params
from diffusiongemma.engine.prompt import Prompt, build_prompt
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.runner import Runner
from diffusiongemma.engine.scheduler import Limits, Scheduler
from diffusiongemma.engine.sequence import Sequence as Running
from diffusiongemma.engine.worker import Handle, Worker
from diffusiongemma.errors import CheckpointError, ConfigError, DiffusionGemmaError, TokenizerError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.quantize import Scheme, ensure_room, footprint, random_network, use_fast_products
from diffusiongemma.text import ChatTemplate, Tokenizer
from diffusiongemma.text.bytes import byte_tokenizer

ASSETS = Path(__file__).parent.parent / "assets"
RANDOM = "random:"


class Engine:
    def __init__(
        self,
        model: DiffusionGemma,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        name: str = "model",
        params: SamplingParams | None = None,
        ends: Iterable[int] = (),
        svg_mode: Mode = "diffusion",
        hole: HoleSettings | None = None,
        limits: Limits | None = None,
        kernels: bool | None = None,
        runner: Runner | None = None,
    ) -> None:
        """`kernels`: Triton kernels and CUDA graphs; None: where they can run. `runner`: one that was made already.

        `svg_mode`: how `dgemma svg` and the studio draw with this model unless told otherwise; nothing else follows it.
        `hole`: how it fills holes best.
        """
        if tokenizer.vocab_size > model.config.vocab_size:
            raise TokenizerError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}: "
                "they do not belong together"
            )
        self.model, self.tokenizer, self.template, self.name = model, tokenizer, template, name
        self.params, self.svg_mode, self.hole = params or SamplingParams(), svg_mode, hole or HoleSettings()
        self.ends = tuple(sorted({*model.config.eos_token_ids, *ends}))
        special = tokenizer.special
        pairs = (("<|channel>", "<channel|>"), ("<|tool_call>", "<tool_call|>"))
        self._pairs = [(special[a], special[b]) for a, b in pairs if a in special and b in special]
        self._limits = limits or Limits()
        self.scheduler = Scheduler(model.config, runner or choose_runner(model, self._limits, kernels), self._limits)
        self.worker = Worker(self.scheduler)
        # The thread would keep the model alive, and must not be ended by force when Python exits.
        weakref.finalize(self, self.worker.close)

    @classmethod
    def load(
        cls,
        name: str | Path = "nano",
        device: str = "auto",
        dtype: str = "auto",
        *,
        quantize: str | None = None,
        group: int | None = None,
        revision: str | None = None,
        limits: Limits | None = None,
        kernels: bool | None = None,
        progress: bool | None = None,
    ) -> Engine:
        """`name`: "nano" (embedded), a checkpoint folder, a hub id, or "random:PRESET" (random weights, for trials).

        `quantize`, `group`: as for `load_model`. `kernels`: as for `Engine`.
        """
        if revision is not None and (str(name) == "nano" or str(name).startswith(RANDOM)):
            raise CheckpointError(f"revision has no effect on {name}: it is for models of the hub")
        if isinstance(name, str) and name.startswith(RANDOM):
            options: dict[str, Any] = {"device": device, "dtype": dtype, "quantize": quantize, "group": group}
            return cls.random(name.removeprefix(RANDOM), limits=limits, kernels=kernels, **options)
        embedded = ASSETS / str(name)
        if str(name) == "nano" and not embedded.is_dir():
            raise CheckpointError("the embedded model 'nano' is not part of this build; try 'random:tiny' or a folder")
        folder = embedded if str(name) == "nano" else resolve(name, revision)
        model = load_model(folder, device, dtype, quantize=quantize, group=group, progress=progress)
        released = released_params(folder)
        tokenizer, template = Tokenizer.from_pretrained(folder), ChatTemplate.find(folder)
        options = {"name": str(name), "limits": limits, "kernels": kernels}
        return cls(model, tokenizer, template, **released._asdict(), **options)

    @classmethod
    def random(
        cls,
        preset: str = "tiny",
        seed: int = 0,
        std: float = 0.1,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        quantize: str | None = None,
        group: int | None = None,
        limits: Limits | None = None,
        kernels: bool | None = None,
    ) -> Engine:
        """Random weights and a tokenizer of bytes: it writes noise, but it runs everywhere and at once."""
        if preset not in PRESETS:
            raise CheckpointError(f"no preset {preset!r} to make a random model of; there are: {', '.join(PRESETS)}")
        where, config = pick_device(device), ModelConfig.preset(preset)
        if quantize in (None, "none"):
            if group is not None:
                raise ConfigError(f"group={group} has no effect without quantize='int4': leave it out")
            kind = pick_dtype(dtype, where, [])
            if where.type == "cpu":
                ensure_room(2 * footprint(config, None), where)  # made in float32
                model = DiffusionGemma(config).init_weights(seed, std).to(kind).eval().requires_grad_(False)
            else:  # made as it will be: in float32, a large one would not fit
                model = random_network(config, None, where, kind, seed, std)
        else:
            scheme = Scheme.parse(quantize, group)
            model = random_network(config, scheme, where, pick_dtype(dtype, where, []), seed, std)
            use_fast_products(model)
        return cls(model, byte_tokenizer(), name=f"{RANDOM}{preset}", limits=limits, kernels=kernels)

    # ---- asking ------------------------------------------------------------------------------------------------------

    def request(
        self,
        prompt: Prompt,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        raw: bool = False,
        pins: Mapping[int, int] | None = None,
        drafts: bool = True,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Request:
        """A checked request; `options` are SamplingParams by name."""
        built = build_prompt(prompt, self.tokenizer, self.template, thinking, tools, raw)
        chosen = SamplingParams.build(params or self.params, **options)
        return Request(built.tokens, chosen, dict(pins or {}), stable=built.stable, drafts=drafts)

    def submit(
        self, request: Request, forward: Callable[[Event], None] | None = None, draws: Draws | None = None
    ) -> Handle:
        """Hand a request in. Its events come from the handle, or go to `forward` on the engine's thread."""
        sequence, handle = self._prepare(request, forward, draws)
        self.worker.submit(sequence, handle)
        return handle

    def submit_group(
        self, requests: Sequence[Request], forward: Callable[[int, Event], None] | None = None
    ) -> list[Handle]:
        """Requests with the same beginning: the first encodes it, the others wait for that and copy its row.

        `forward` gets each event with the number of its request.
        """
        forwards = [None if forward is None else partial(forward, i) for i in range(len(requests))]
        prepared = [self._prepare(request, to) for request, to in zip(requests, forwards, strict=True)]
        group = [sequence for sequence, _ in prepared]
        for sequence, handle in prepared:
            sequence.group = group
            self.worker.submit(sequence, handle)
        return [handle for _, handle in prepared]

    def check(self, request: Request) -> None:
        """Raise an InputError for what this model can never do."""
        config = self.model.config
        request.check(config.vocab_size, config.canvas_length, config.max_position_embeddings)

    def _prepare(
        self, request: Request, forward: Callable[[Event], None] | None, draws: Draws | None = None
    ) -> tuple[Running, Handle]:
        self.check(request)
        config = self.model.config
        seed = secrets.randbits(31) if request.params.seed is None else request.params.seed
        handle = Handle(forward, owner=self)
        output = OutputText(self.tokenizer, request.params.stop, skip_special=True)
        sequence = Running(
            request, config, output, handle.emit, self.tokenizer.decode, self.ends, self._pairs, seed, draws
        )
        return sequence, handle

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Event]:
        """Events as they come: drafts, commits, one end. Closing the generator cancels the request."""
        return self.events(self.request(prompt, **options))

    def events(self, request: Request) -> Iterator[Event]:
        handle = self.submit(request)
        try:
            yield from handle
        finally:
            handle.cancel()

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Event]:
        """The same for an event loop. Leaving the loop over it cancels the request."""
        async for event in self.aevents(self.request(prompt, **options)):
            yield event

    async def aevents(self, request: Request) -> AsyncIterator[Event]:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event] = asyncio.Queue()

        def forward(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put_nowait, event)

        handle = self.submit(request, forward)
        try:
            while True:
                event = await inbox.get()
                yield event
                if isinstance(event, End):
                    return
        finally:
            handle.cancel()

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """The whole answer at once."""
        return collect(self.events(self.request(prompt, drafts=False, **options)))

    def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """Several answers, computed together. A seed is given to the first; the others count on from it."""
        requests = []
        for i, prompt in enumerate(prompts):
            request = self.request(prompt, drafts=False, **options)
            self.check(request)
            if (seed := request.params.seed) is not None:
                request = replace(request, params=replace(request.params, seed=seed + i))
            requests.append(request)
        handles = [self.submit(request) for request in requests]
        try:
            return [collect(handle) for handle in handles]
        finally:  # if one fails, the others stop
            for handle in handles:
                handle.cancel()

    # ---- holes and edits ---------------------------------------------------------------------------------------------

    def infill(self, prefix: str, suffix: str, **options: Any) -> InfillResult:
        """The text between two texts, of a length that the model chooses; `.text` is the middle alone."""
        return drain(infill_stream(self, prefix, suffix, drafts=False, **options))

    def infill_stream(self, prefix: str, suffix: str, **options: Any) -> Iterator[Event]:
        return infill_stream(self, prefix, suffix, **options)

    def fill(self, template: Template, **options: Any) -> FillResult:
        """A text with holes, `[[?]]` or `[[?12]]` (at most 12 tokens), or a list of texts and `Hole`s."""
        return drain(fill_stream(self, template, drafts=False, **options))

    def fill_stream(self, template: Template, **options: Any) -> Iterator[Event]:
        return fill_stream(self, template, **options)

    def form(self, prompt: Prompt, template: Template, **options: Any) -> FillResult:
        """The answer to a prompt as a text with holes, each of a stated size, on one canvas."""
        return drain(form_stream(self, prompt, template, drafts=False, **options))

    def form_stream(self, prompt: Prompt, template: Template, **options: Any) -> Iterator[Event]:
        return form_stream(self, prompt, template, **options)

    def edit(self, text: str, strength: float = 0.5, keep: Iterable[Span] = (), **options: Any) -> EditResult:
        """Replace about this share of the text's tokens by noise and denoise; spans in `keep` stay as they are."""
        return drain(edit_stream(self, text, strength, keep, drafts=False, **options))

    def edit_stream(
        self, text: str, strength: float = 0.5, keep: Iterable[Span] = (), **options: Any
    ) -> Iterator[Event]:
        return edit_stream(self, text, strength, keep, **options)

    def close(self) -> None:
        self.worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collect(handle: Iterable[Event]) -> Result:
    """Add a stream up."""
    text, tokens, logprobs = "", list[int](), list[TokenLogprob]()
    scored = False
    for event in handle:
        if isinstance(event, Commit):
            text += event.text
            tokens += event.tokens
            if event.logprobs is not None:
                scored = True
                logprobs += event.logprobs
        elif isinstance(event, End):
            if event.finish_reason == "error":
                raise DiffusionGemmaError(f"the request failed: {event.error}")
            return Result(text, tokens, event.finish_reason, event.metrics, logprobs if scored else None)
    raise AssertionError("a stream ended without an end event")
