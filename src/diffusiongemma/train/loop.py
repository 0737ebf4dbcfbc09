"""The training loop: batches in, checkpoints, metrics and an exported model out.

All randomness of a step is seeded by the step's number, and its rows are a function of it, so the number is all that a
resumed run needs besides the tensors: on a CPU its losses are the same to the last bit.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import CheckpointError, ConfigError, DiffusionGemmaError
from diffusiongemma.train import checkpoint
from diffusiongemma.train.batches import Batches
from diffusiongemma.train.data import bpe
from diffusiongemma.train.evaluate import Evaluator, evaluators
from diffusiongemma.train.experts import PATHS, ExpertsPath, pick_experts
from diffusiongemma.train.export import export, rebuild
from diffusiongemma.train.flops import peak_flops, row_flops
from diffusiongemma.train.forward import TrainingForward
from diffusiongemma.train.graphs import Recorded, record_all
from diffusiongemma.train.held import Held
from diffusiongemma.train.initial import first_weights
from diffusiongemma.train.objective import Result, micro_loss
from diffusiongemma.train.optim import Optimizer, clear_gradients, gradient_norm, rate
from diffusiongemma.train.recipe import Recipe
from diffusiongemma.train.report import Report, Window, plot
from diffusiongemma.train.rows import Rows
from diffusiongemma.train.sources import Vocabulary

USAGE_MEMORY = 0.95  # of the running load of the experts, a step
EVALUATION_ROWS = 256


class TrainingDiverged(DiffusionGemmaError):
    """The loss is no number any more; the last checkpoint is still good."""


class Trainer:
    def __init__(self, recipe: Recipe, out: Path, device: torch.device, quiet: bool = False) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        self.started = time.monotonic()
        self.vocabulary = Vocabulary(recipe.tokenizer)
        self.batches = Batches(recipe, self.vocabulary)
        gpu = device.type == "cuda"
        self.model = first_weights(recipe, device, getattr(torch, recipe.run.dtype) if gpu else torch.float32)
        config = self.model.config
        if self.vocabulary.size > config.vocab_size:
            raise ConfigError(f"the tokenizer has {self.vocabulary.size} entries, the network only {config.vocab_size}")
        self.optimizer = Optimizer(self.model, recipe.optim)
        chosen = recipe.run.experts
        if chosen not in ("auto", *PATHS):
            raise ConfigError(f"[run] experts must be auto or one of {', '.join(PATHS)}, got {chosen!r}")
        dtype = self.model.embed_tokens.weight.dtype
        path = pick_experts(device, dtype) if chosen == "auto" else cast(ExpertsPath, chosen)
        self.forward = TrainingForward(self.model, path, compile=gpu and recipe.run.compile)
        layers, experts = config.num_hidden_layers, config.num_experts
        self.usage = torch.full((layers, experts), 1.0 / experts, device=device)
        self.graphs: dict[str, Recorded] = {}
        self.held = {
            task.name: Held.nobody(
                self.batches.draw(n, 0).to(device), config.hidden_size, dtype, task.hold, task.forget, task.trust
            )
            for n, task in enumerate(recipe.tasks)
            if task.hold
        }
        self.step, self.trained_seconds, self.tokens = 0, 0.0, 0
        self._resume()
        self.report = Report(out, self.step, quiet)
        per_row = {t.name: row_flops(config, t, recipe.objective) for t in recipe.tasks}
        self.flops = {t.name: per_row[t.name] * n for t, n in zip(recipe.tasks, self.batches.counts, strict=True)}
        self.tasks = {t.name: t for t in recipe.tasks}
        self.objectives = {t.name: recipe.objective_of(t) for t in recipe.tasks}
        parameters = sum(p.numel() for p in self.model.parameters())
        self.report.say(
            f"{recipe.name}: {parameters / 1e6:.1f} M parameters on {device}, experts {path}, "
            f"compile {self.forward.compiled}, step {self.step}, rows a micro-batch: "
            + ", ".join(f"{name} {n}" for name, n in zip(self.flops, self.batches.counts, strict=True))
        )

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self, max_minutes: float | None = None) -> bool:
        """Train until the schedule's end or for `max_minutes` of this process; returns whether the end was reached."""
        run = self.recipe.run
        self.warm_up()
        checks = evaluators(self.recipe, self.vocabulary, EVALUATION_ROWS) if run.evaluate_every else []
        stream = self.batches.stream(self.step, pin=self.device.type == "cuda")
        mark = saved = time.monotonic()
        window = Window()
        while self.progress() < 1.0:
            if max_minutes is not None and time.monotonic() - self.started > 60 * max_minutes:
                break
            norm, factor = self.train_step(next(stream), window)
            now = time.monotonic()
            self.trained_seconds += now - mark
            mark = now
            if self.step % run.log_every == 0:
                self._log(window, norm, factor)
                window = Window()
            if checks and self.step % run.evaluate_every == 0:
                self._evaluate(checks)
                mark = time.monotonic()  # evaluating is not training
            due = time.monotonic() - saved > 60 * run.checkpoint_minutes if run.checkpoint_minutes else False
            if due or (run.checkpoint_every and self.step % run.checkpoint_every == 0):
                self.save()
                mark = saved = time.monotonic()
        if checks:
            self._evaluate(checks)
        self.save()
        self.finish()
        self.report.close()
        return self.progress() >= 1.0

    def _evaluate(self, checks: list[Evaluator]) -> None:
        """With the averaged weights, uncompiled: other sizes than in training would compile again."""
        figures: dict[str, float] = {}
        self.optimizer.swap(averaged=True)
        eager = TrainingForward(self.model, self.forward.experts)
        for check in checks:
            figures |= check(eager)
        self.optimizer.swap(averaged=False)
        self.report.record({**self._where(), "evaluation": figures})

    def progress(self) -> float:
        run = self.recipe.run
        if run.total_steps:
            return self.step / run.total_steps
        return self.trained_seconds / (60 * run.total_minutes)

    def train_step(self, micros: list[Rows], window: Window) -> tuple[Tensor, float]:
        torch.manual_seed(self.recipe.run.seed * 1_000_003 + self.step)
        loads = []
        for rows in micros:
            recorded = self.graphs.get(rows.task)
            result = self._backward(rows) if recorded is None else recorded(rows)
            loads.append(result.load)
            window.add(rows.task, result, self.flops[rows.task], self._tokens(rows))
        self.usage.lerp_(torch.stack(loads).mean(dim=0), 1.0 - USAGE_MEMORY)
        factor = rate(self.recipe.optim, self.step, self.progress())
        norm = self.optimizer.step(factor, keep=bool(self.graphs))
        self.step += 1
        self.tokens += sum(map(self._tokens, micros))
        return norm, factor

    def _backward(self, rows: Rows) -> Result:
        """Adds the micro-batch's share to the gradients."""
        result = self._loss(rows)
        (result.loss / self.recipe.run.accumulate).backward()
        return result

    def _loss(self, rows: Rows) -> Result:
        task = self.tasks[rows.task]
        return micro_loss(
            self.forward,
            rows.to(self.device),
            self.objectives[rows.task],
            views=task.views,
            usage=self.usage,
            rounds=task.rounds,
            noise=task.noise,
            held=self.held.get(rows.task),
            drop=task.drop,
        )

    def _tokens(self, rows: Rows) -> int:
        task = self.tasks[rows.task]
        return rows.prefix.numel() + rows.canvas.numel() * (1 + task.views * task.rounds)

    def warm_up(self) -> None:
        """One micro-batch of every task without an update: compiles, and goes on with less where that fails."""
        if self.device.type != "cuda":
            return
        start = time.monotonic()
        resumed = {name: {k: t.clone() for k, t in held.tensors().items()} for name, held in self.held.items()}
        experts = self.forward.experts
        plans: list[tuple[ExpertsPath, bool]] = [(experts, False)]
        if self.forward.compiled:
            plans = [(experts, True), ("dense", True), (experts, False)]
        for number, (path, compiled) in enumerate(plans):
            self.forward = TrainingForward(self.model, path, compiled)
            try:
                losses = self._try_all()
                break
            except Exception as error:  # a compiler may fail in any way; without one more plan it is ours to fail
                if number + 1 == len(plans):
                    raise
                reason = f"{type(error).__name__}: {str(error)[:1500]}"
                self.report.say(f"experts {path}, compile {compiled} failed: {reason}")
        if self.recipe.run.graphs:
            self._record()
        for name, held in self.held.items():
            held.load(resumed[name])
        self.report.say(
            f"warm-up {time.monotonic() - start:.1f} s, experts {path}, compile {compiled}, graphs {len(self.graphs)}, "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most, first losses {losses}"
        )

    def _record(self) -> None:
        """Micro-batches as CUDA graphs, checked against the same ones without; where that fails, it goes on without."""
        examples = [self.batches.draw(n, 0) for n in range(len(self.recipe.tasks))]
        try:
            recorded = record_all(self._backward, [rows.to(self.device) for rows in examples], self.model)
            self._forget()
            torch.manual_seed(0)
            replayed = recorded[examples[0].task](examples[0]).loss.item()
            norm = gradient_norm(self.model)
            clear_gradients(self.model, keep=True)
            self._forget()
            torch.manual_seed(0)
            plain = self._backward(examples[0]).loss.item()
            expected = gradient_norm(self.model)
        except RuntimeError as error:
            self.report.say(f"CUDA graphs do not work here, going on without: {str(error)[:500]}")
            clear_gradients(self.model, keep=False)
            return
        self.report.say(f"graph {replayed:.4f} |g| {norm:.4f}, plain {plain:.4f} |g| {expected:.4f}")
        if abs(replayed - plain) < 1e-3 * abs(plain) and abs(norm - expected) < 0.02 * expected:
            self.graphs = recorded
        else:
            self.report.say("the graph's loss or gradient is another one: going on without graphs")
        clear_gradients(self.model, keep=bool(self.graphs))

    def _forget(self) -> None:
        """Two passes are only comparable if the first leaves nothing behind."""
        for held in self.held.values():
            held.clear()

    def _try_all(self) -> dict[str, float]:
        losses = {}
        self._forget()
        for number, task in enumerate(self.recipe.tasks):
            torch.manual_seed(number)
            losses[task.name] = round(self._backward(self.batches.draw(number, 0)).loss.item(), 3)
        if self.forward.compiled:  # the same numbers without the compiler, on the smallest risk of memory: no gradient
            compiled, self.forward = self.forward, TrainingForward(self.model, self.forward.experts)
            self._forget()
            with torch.no_grad():
                torch.manual_seed(0)
                task = self.recipe.tasks[0]
                plain = self._loss(self.batches.draw(0, 0)).loss.item()
            self.forward = compiled
            self.report.say(f"{task.name}: compiled {losses[task.name]}, plain {plain:.3f}")
            if abs(plain - losses[task.name]) > 0.05 * plain:
                raise TrainingDiverged(f"the compiled loss {losses[task.name]} is not the plain one {plain:.3f}")
        clear_gradients(self.model, keep=False)
        return losses

    # ---- telling and keeping -------------------------------------------------------------------------------------

    def _where(self) -> dict[str, Any]:
        return {"step": self.step, "progress": self.progress(), "tokens": self.tokens}

    def _log(self, window: Window, norm: Tensor, factor: float) -> None:
        tasks = window.means()  # waits for the device
        seconds = time.monotonic() - window.start
        spread = self.usage * self.usage.shape[1]
        entropy = -(self.usage * self.usage.clamp(min=1e-9).log()).sum(dim=1) / torch.tensor(self.usage.shape[1]).log()
        peak = peak_flops(self.device)
        record = {
            **self._where(),
            "rate": factor,
            "grad_norm": norm.item(),
            "load_max": spread.max().item(),
            "load_entropy": entropy.min().item(),
            "tasks": tasks,
            "tokens_per_second": window.tokens / seconds,
            "mfu": window.flops / seconds / peak if peak else None,
            "seconds": self.trained_seconds,
        }
        self.report.record(record)
        if any(value != value for metrics in tasks.values() for value in metrics.values()):
            raise TrainingDiverged(f"the loss is not a number at step {self.step}: resume with a smaller rate")

    def save(self) -> Path:
        state = {
            "trained_seconds": self.trained_seconds,
            "tokens": self.tokens,
            "updates": self.optimizer.updates,
            "model": self.model.config.to_dict(),
            "recipe": {"name": self.recipe.name, "tasks": [asdict(task) for task in self.recipe.tasks]},
        }
        buffers = {f"buffer.{name}": value for name, value in self.model.named_buffers()}
        kept = {f"held.{task}/{k}": t for task, held in self.held.items() for k, t in held.tensors().items()}
        tensors = {**self.optimizer.tensors(), **buffers, **kept, "usage": self.usage}
        return checkpoint.save(self.out / "checkpoints", self.step, tensors, state, self.recipe.run.keep_checkpoints)

    def _resume(self) -> None:
        saved = checkpoint.load_latest(self.out / "checkpoints")
        if saved is None:
            return
        if ModelConfig.from_dict(saved.state["model"]) != self.model.config:
            raise CheckpointError(f"{self.out} holds a run of another network: give another folder, or its own recipe")
        self.optimizer.load(saved.tensors, saved.state["updates"])
        self.usage.copy_(saved.tensors["usage"])
        for name, held in self.held.items():
            own = f"held.{name}/"
            held.load({key.removeprefix(own): t for key, t in saved.tensors.items() if key.startswith(own)})
        self.step, self.tokens = saved.step, saved.state["tokens"]
        self.trained_seconds = saved.state["trained_seconds"]

    def finish(self) -> None:
        """Curves and the averaged weights as a model."""
        plot(self.out)
        buffers = dict(self.model.named_buffers())
        model = rebuild(self.model.config, {**self.optimizer.averaged(), **buffers})
        export(model, self.out / "model", self.recipe.tokenizer, init_from=self.recipe.init_from)
        if self.recipe.tokenizer == "bytes":  # it came from no folder, so none was copied
            bpe.save(self.vocabulary.library, self.out / "model")
        self.report.say(f"step {self.step}, {100 * self.progress():.1f}%: {self.out / 'model'}")
