"""Tokenizer, chat template, thinking and tool channels, incremental detokenising."""

from diffusiongemma.text.channels import Reply, ToolCall, parse_ids, parse_reply
from diffusiongemma.text.chat import ChatTemplate, default_chat_template
from diffusiongemma.text.detokenize import Detokenizer
from diffusiongemma.text.tokenizer import CONTROL_TOKENS, Tokenizer

__all__ = [
    "CONTROL_TOKENS",
    "ChatTemplate",
    "Detokenizer",
    "Reply",
    "Tokenizer",
    "ToolCall",
    "default_chat_template",
    "parse_ids",
    "parse_reply",
]
