"""Figures for Prometheus. No label holds anything that a client wrote."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diffusiongemma.engine import Engine
from diffusiongemma.engine.fast import FastRunner
from diffusiongemma.serve.replies import Usage

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("dgemma_requests", "Answered requests.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "dgemma_request_seconds", "From the first byte to the last.", ["path"], buckets=SECONDS, registry=registry
        )
        self.running = Gauge("dgemma_rows_running", "Rows of the engine in use.", registry=registry)
        self.waiting = Gauge("dgemma_requests_waiting", "Requests in the queue.", registry=registry)
        self.prompt_tokens = Counter("dgemma_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.cached_tokens = Counter("dgemma_cached_tokens", "… found in the prefix cache.", registry=registry)
        self.new_tokens = Counter("dgemma_new_tokens", "Tokens of answers.", registry=registry)
        self.steps = Counter("dgemma_steps", "Denoising steps, or tokens drawn one by one.", registry=registry)
        self.redone = Counter("dgemma_blocks_redone", "Blocks thrown away as garbage.", registry=registry)
        self.queue_seconds = Histogram(
            "dgemma_queue_seconds", "Waiting for the engine.", buckets=SECONDS, registry=registry
        )
        self.first_draft = Histogram(
            "dgemma_first_draft_seconds", "Until the first draft.", buckets=SECONDS, registry=registry
        )
        self._failures = Gauge("dgemma_engine_failures", "Steps of the engine that failed.", registry=registry)
        self._recorded = Gauge("dgemma_passes_recorded", "Passes recorded as CUDA graphs so far.", registry=registry)
        self._dropped = Gauge("dgemma_passes_dropped", "… given up since, for others.", registry=registry)
        self.lost_log_lines = Gauge("dgemma_log_lines_lost", "Log lines that could not be written.", registry=registry)

    def watch(self, engine: Engine) -> None:
        self._failures.set_function(lambda: engine.worker.failures)
        runner = engine.scheduler.runner
        if isinstance(runner, FastRunner):
            recorder = runner.recorder
            self._recorded.set_function(lambda: recorder.recorded)
            self._dropped.set_function(lambda: recorder.shelves.dropped)

    def answered(self, usage: Usage) -> None:
        """One request was answered to its end."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
        self.new_tokens.inc(usage.completion_tokens)
        figures = usage.diffusion
        self.steps.inc(figures.steps)
        self.redone.inc(figures.blocks_redone)
        self.queue_seconds.observe(figures.queue_seconds)
        if figures.first_draft_seconds is not None:
            self.first_draft.observe(figures.first_draft_seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
