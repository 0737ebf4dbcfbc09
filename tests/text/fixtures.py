"""Small tokenizers made from scratch, with DiffusionGemma's special tokens at their ids, and a checkpoint folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from diffusiongemma.text import Tokenizer, default_chat_template

KINDS = ("byte_level", "gemma_like")
SPECIAL_IDS = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4,
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50,
    "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98, "<|channel>": 100, "<channel|>": 101,
    "<|turn>": 105, "<turn|>": 106,
}  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It then thought about the weather in Zürich.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 34))  # 46",
    "Le café est très bon, naïve façade; ¿qué pasa? Größe, 東京 and Привет.",
    "user system model tool thought call response declaration description parameters type string",
] * 4
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
    "clean_up_tokenization_spaces": False,
}  # fmt: skip


def _first_tokens() -> list[str]:
    by_id = {id: text for text, id in SPECIAL_IDS.items()}
    return [by_id.get(id, f"<unused{id}>") for id in range(max(by_id) + 1)]


@cache
def tokenizer_json(kind: str) -> str:
    """A tokenizer.json of about 700 tokens."""
    first = _first_tokens()
    bytes_ = [f"<0x{b:02X}>" for b in range(256)] if kind == "gemma_like" else []
    if kind == "byte_level":
        library = Library(models.BPE())
        digits = pre_tokenizers.Digits(individual_digits=True)
        library.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        library.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        library.normalizer = normalizers.Replace(" ", "▁")
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=first + bytes_, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    data = json.loads(library.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in bytes_]
    for token in data["added_tokens"]:  # as in Gemma's own file, fillers are added but not special
        token["special"] = not token["content"].startswith("<unused")
    return json.dumps(data)


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(tokenizer_json(kind))


def write_folder(folder: Path, kind: str, **config: Any) -> Path:
    """The text files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG | config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(default_chat_template(), encoding="utf-8")
    return folder
