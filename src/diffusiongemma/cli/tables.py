"""Rich tables for what `model.summary` counts; they stay readable in a pipe and in 60 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from diffusiongemma.config import ModelConfig
from diffusiongemma.model.summary import FORMATS, ModelSummary

EXACT_WIDTH = 60  # what the digits of the 26B model need


def human_count(count: int) -> str:
    """49_490_138 -> '49.5 M'; 25_250_986_178 -> '25.2 B': billions are cut, as sizes of models are quoted. Tables give
    every digit."""
    if count < 1000:
        return str(count)
    if count >= 10**9:
        return f"{count // 10**8 / 10:.1f} B"
    millions = round(count / 10**6, 1)
    return f"{millions:.1f} M" if millions >= 1 else f"{count / 10**3:.1f} k"


def human_bytes(count: int) -> str:
    """50_400_000_000 -> '50.4 GB' (decimal units, as memory bandwidths are given)"""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str] = ()) -> Table:
    """The first column is text, the others are figures. Columns without a name make a table without a header."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(columns),
        show_footer=bool(total),
    )
    for i, column in enumerate(columns):
        # A narrow terminal breaks the words of the first column, never a figure.
        figures = i > 0
        table.add_column(
            column, total[i] if total else "", justify="right" if figures else "left", no_wrap=figures, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table


def config_table(config: ModelConfig) -> Table:
    sliding = sum(map(config.is_sliding, range(config.num_hidden_layers)))
    return make_table(
        "Configuration",
        ("", ""),
        [
            ("layers", f"{sliding} sliding, {config.num_hidden_layers - sliding} full"),
            ("hidden size", f"{config.hidden_size:,}"),
            ("vocabulary", f"{config.vocab_size:,}"),
            ("query heads", f"{config.num_attention_heads}"),
            ("K/V heads, sliding", f"{config.num_key_value_heads} × {config.head_dim}"),
            ("K/V heads, full", f"{config.num_global_key_value_heads} × {config.global_head_dim}"),
            ("sliding window", f"{config.sliding_window:,}"),
            ("dense MLP", f"{config.intermediate_size:,}"),
            ("experts", f"{config.num_experts} × {config.moe_intermediate_size}, top {config.top_k_experts}"),
            ("canvas", f"{config.canvas_length:,}"),
            ("longest text", f"{config.max_position_embeddings:,}"),
            ("end tokens", ", ".join(map(str, config.eos_token_ids)) or "none"),
        ],
    )


def parameters_table(summary: ModelSummary, width: int = 80) -> Table:
    """Every digit where `width` columns have room for it."""
    show = "{:,}".format if width >= EXACT_WIDTH else human_count
    shares = [f"{part.parameters / summary.parameters:.1%}" for part in summary.parts]
    rows = [(p.name, show(p.parameters), share, show(p.active)) for p, share in zip(summary.parts, shares, strict=True)]
    total = ("total", show(summary.parameters), "", show(summary.active))
    return make_table("Parameters", ("part", "all", "share", "active"), rows, total)


def memory_table(summary: ModelSummary) -> Table:
    rows = [(p.name, *(human_bytes(p.bytes[fmt]) for fmt in FORMATS)) for p in summary.parts]
    total = ("total", *(human_bytes(summary.bytes[fmt]) for fmt in FORMATS))
    return make_table("Weights in memory, with scales", ("part", *FORMATS), rows, total)


def cache_table(summary: ModelSummary, config: ModelConfig) -> Table:
    cache = summary.cache
    longest = config.max_position_embeddings
    rows = [
        (
            f"a token, up to {cache.window:,}",
            human_bytes(cache.sliding_bytes_per_token + cache.full_bytes_per_token),
        ),
        ("a token after that", human_bytes(cache.full_bytes_per_token)),
        ("sliding layers, window full", human_bytes(cache.sliding_bytes_per_token * cache.window)),
    ]
    for tokens in sorted({1024, 8192, 32_768, longest}):
        if tokens <= longest:
            rows.append((f"all layers at {tokens:,} tokens", human_bytes(cache.bytes_at(tokens))))
    return make_table("K/V cache of one sequence, bf16", ("", ""), rows)
