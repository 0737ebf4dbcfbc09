"""The figures of a request, from those of its choices."""

from __future__ import annotations

from collections.abc import Sequence

from diffusiongemma.engine import Metrics
from diffusiongemma.serve.replies import CompletionDetails, DiffusionUsage, PromptDetails, Usage


def usage_of(parts: Sequence[Metrics], waited: float = 0.0, thought_tokens: int = 0, prompts: int = 1) -> Usage:
    """`parts`: one a choice, those of a prompt side by side. `waited`: seconds before they were handed in.

    Counts are sums; a prompt counts once, however many choices it has. Times are the earliest or the last of all.
    """
    heads = parts[:: len(parts) // prompts]
    prompt_tokens = sum(part.prompt_tokens for part in heads)
    new_tokens = sum(part.new_tokens for part in parts)
    steps = sum(part.steps for part in parts)
    queue = waited + min(part.queue_seconds for part in parts)
    total = waited + max(part.total_seconds for part in parts)
    drafts = [part.first_draft_seconds for part in parts if part.first_draft_seconds is not None]
    texts = [part.first_text_seconds for part in parts if part.first_text_seconds is not None]
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=new_tokens,
        total_tokens=prompt_tokens + new_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(part.reused_tokens for part in heads)),
        completion_tokens_details=CompletionDetails(reasoning_tokens=thought_tokens),
        diffusion=DiffusionUsage(
            seed=parts[0].seed,
            blocks=sum(part.blocks for part in parts),
            blocks_settled=sum(part.blocks_settled for part in parts),
            blocks_redone=sum(part.blocks_redone for part in parts),
            steps=steps,
            decoder_forwards=sum(part.decoder_forwards for part in parts),
            encoder_forwards=sum(part.encoder_forwards for part in parts),
            positions=sum(part.positions for part in parts),
            queue_seconds=round(queue, 6),
            prefill_seconds=round(waited + min(part.prefill_seconds for part in parts), 6),
            first_draft_seconds=round(waited + min(drafts), 6) if drafts else None,
            first_text_seconds=round(waited + min(texts), 6) if texts else None,
            total_seconds=round(total, 6),
            tokens_per_forward=round(new_tokens / steps, 4) if steps else 0.0,
            tokens_per_second=round(new_tokens / (total - queue), 3) if total > queue else 0.0,
        ),
    )
