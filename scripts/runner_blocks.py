"""Texts of several blocks on small networks: commits launched behind the last step, alone or with the next canvas's
first, prompts and blocks of users who come one after another, copies of prompts that are kept, and caches that are only
filled."""

from __future__ import annotations

from dataclasses import replace

import torch
from runner_small import LIMITS, SMALL, run_all, small_network, tell_differences
from runner_stage import TINY, check
from torch import Tensor

from diffusiongemma.engine import Request, SamplingParams
from diffusiongemma.engine import steps as steps_module
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.pool import PoolRow
from diffusiongemma.ops.memory import is_out_of_memory

# Of several users a block is committed ahead only where its row could forget it again: the ring must have room for it.
# What one user's overwrites is put aside.
CONFIG = replace(SMALL, sliding_window=64 if TINY else 2048)
NARROW = replace(CONFIG, sliding_window=SMALL.sliding_window)
BLOCKS = 2 if TINY else 3
WIDE = replace(LIMITS, chunk=16 if TINY else 1024)  # four blocks are committed in one pass


def blocks(kind: str | None) -> None:
    name = kind or "bf16"
    narrow, model = (small_network(kind, config) for config in (NARROW, CONFIG))
    _ahead(f"{name}, 1 user, a narrow window", narrow, 1)
    for users in () if TINY else (1, 4):
        _ahead(f"{name}, {users} users", model, users)
    _one_after_another(name, model)
    _kept(name, narrow)
    _remembered(name, model)
    if not TINY:
        _broken(name, model)


def _ahead(name: str, model: DiffusionGemma, users: int) -> None:
    """The same texts whether the host waits, and whether the card has memory to spare"""
    asked = _requests(users)
    early = Spy(model, triton_ops(exact=True), WIDE)
    got = run_all(model, early, asked)
    ahead = users * (BLOCKS - 1)
    check(f"{name}: blocks committed before they are read", early.ahead_of == ahead, str(early.ahead_of))
    check(f"{name}: … in one pass with a step", early.turned == (ahead if users == 1 else 0), str(early.turned))
    others = {"that waits": FastRunner(model, triton_ops(exact=True), LIMITS, ahead=False)}
    if not TINY:
        others["without graphs"] = FastRunner(model, triton_ops(exact=True), LIMITS, graphs=False)
        others["with memory to spare"] = FastRunner(model, triton_ops(exact=True), replace(LIMITS, chunk=None))
    for what, runner in others.items():
        want = run_all(model, runner, asked)
        check(f"{name}: as by a runner {what}", got == want)
        if got != want:
            tell_differences(got, want)


def _one_after_another(name: str, model: DiffusionGemma) -> None:
    """A new user every second tick: who steps takes along what others have to encode"""
    asked, found = _requests(2 if TINY else 4), []
    for ahead in (True, False):
        runner = Spy(model, triton_ops(exact=True), replace(LIMITS, chunk=64 if TINY else None), ahead=ahead)
        steps_module.OFTEN, often = 0, steps_module.OFTEN
        try:
            found.append(run_all(model, runner, asked, every=2))
        finally:
            steps_module.OFTEN = often
        if ahead:
            kinds = [kind for lane in runner._lanes.values() for kind in lane.steps.shelf if kind.before]
            mixed = [kind for kind in kinds if kind.before.rows < kind.rows]
            check(f"{name}, one after another: kinds of steps with tokens of others", bool(mixed), str(len(mixed)))
    check(f"{name}, one after another: as by a runner that waits", found[0] == found[1])
    if found[0] != found[1]:
        tell_differences(found[0], found[1])


def _kept(name: str, model: DiffusionGemma) -> None:
    """Texts that outgrow the window: a copy of a prompt that went with a step is as if it had a pass of its own"""
    asked, copies, texts = _requests(1)[0], [], []
    prompt = len(asked.prompt)
    for ahead in (True, False):
        runner = FastRunner(model, triton_ops(exact=True), WIDE, ahead=ahead)
        rows: list[Tensor] = []
        fork = PoolRow.fork

        def forked(row, max_length=None, length=None, rows=rows, fork=fork):  # type: ignore[no-untyped-def]
            copy = fork(row, max_length, length)
            parts = (copy.last(layer, copy.length) for layer in range(NARROW.num_hidden_layers))
            rows += [torch.cat(part, dim=1).clone() for pair in parts for part in pair]
            return copy

        PoolRow.fork = forked  # type: ignore[method-assign]
        try:
            texts.append([run_all(model, runner, [replace(asked, stable=n)]) for n in (prompt, prompt - 2)])
        finally:
            PoolRow.fork = fork  # type: ignore[method-assign]
        copies.append(rows)
    count = 4 * NARROW.num_hidden_layers
    check(f"{name}: two prompts are kept", len(copies[0]) == len(copies[1]) == count, str(len(copies[0])))
    check(f"{name}: … as with passes of their own", texts[0] == texts[1] and all(map(torch.equal, *copies)))


def _broken(name: str, model: DiffusionGemma) -> None:
    """A recording that runs out of memory in its middle: the error says so, and the next is recorded and right"""
    recorder, runs = FastRunner(model, triton_ops(exact=True), LIMITS).recorder, list[int]()
    x, y, side = (torch.ones(1000, device=model.device), torch.zeros(1000, device=model.device), torch.cuda.Stream())

    def work() -> None:
        runs.append(1)
        y.copy_(2 * x)
        if len(runs) == 3:  # compiled, rehearsed, and now recorded
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.add_(1)
            raise torch.OutOfMemoryError("made up")

    heard = None
    try:
        recorder.record("what fails", work)
    except Exception as error:
        heard = error
    on = torch.cuda.current_stream() == torch.cuda.default_stream()
    check(f"{name}: a recording without memory", heard is not None and is_out_of_memory(heard) and on, repr(heard))
    replay = recorder.record("what does not", lambda: y.copy_(3 * x))
    y.zero_()
    replay()
    check(f"{name}: … spoils no other", bool((y == 3).all()) and recorder.recorded == 1)


class Spy(FastRunner):
    ahead_of = turned = 0  # blocks

    def _commit_ahead(self, *args):  # type: ignore[no-untyped-def]
        found = super()._commit_ahead(*args)
        self.ahead_of += len(found)
        self.turned += sum(block.following is not None for block in found)
        return found


def _requests(users: int) -> list[Request]:
    width, steps = CONFIG.canvas_length, 2 if TINY else 4
    params = {"max_new_tokens": BLOCKS * width, "steps": steps, "early_stop": False}
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 260, (5 if TINY else 100 + 30 * i,), generator=random).tolist() for i in range(users)]
    return [Request(tuple(p), SamplingParams.build(**params, seed=i), ends=False) for i, p in enumerate(prompts)]


@torch.inference_mode()
def _remembered(name: str, model: DiffusionGemma) -> None:
    """A cache that was only filled is that of an encoded text, to the bit"""
    runner = FastRunner(model, triton_ops(exact=True), LIMITS)
    counts = [9, 4] if TINY else [300, 77]
    tokens = torch.randint(3, 260, (sum(counts),), generator=torch.Generator().manual_seed(3))
    encoded, kept = ([runner.new_row(n) for n in counts] for _ in range(2))
    runner.slate.encode(tokens, encoded, counts)
    runner.slate.remember(tokens, kept, counts)
    same = True
    for a, b, count in zip(encoded, kept, counts, strict=True):
        assert isinstance(a, PoolRow)
        assert isinstance(b, PoolRow)
        for layer in range(CONFIG.num_hidden_layers):
            pairs = zip(a.last(layer, count), b.last(layer, count), strict=True)
            same &= all(torch.equal(torch.cat(x, dim=1), torch.cat(y, dim=1)) for x, y in pairs)
    check(f"{name}: remembering fills the cache as encoding does", same)
