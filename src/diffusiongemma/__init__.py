"""DiffusionGemma: the text-diffusion mixture-of-experts model, its checkpoints and the engine around it.

The names below load on first use, so that `dgemma --help` and `import diffusiongemma` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module it lives in.
_EXPORTS = {
    "CacheError": "diffusiongemma.errors",
    "CheckpointError": "diffusiongemma.errors",
    "ConfigError": "diffusiongemma.errors",
    "DeviceError": "diffusiongemma.errors",
    "DiffusionGemma": "diffusiongemma.model",
    "DiffusionGemmaError": "diffusiongemma.errors",
    "Engine": "diffusiongemma.engine",
    "InputError": "diffusiongemma.errors",
    "KVCache": "diffusiongemma.model",
    "Limits": "diffusiongemma.engine",
    "ModelConfig": "diffusiongemma.config",
    "Request": "diffusiongemma.engine",
    "Result": "diffusiongemma.engine",
    "SamplingParams": "diffusiongemma.engine",
    "TokenizerError": "diffusiongemma.errors",
    "load_model": "diffusiongemma.checkpoint",
    "save_model": "diffusiongemma.checkpoint",
}

__all__ = [
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "DiffusionGemma",
    "DiffusionGemmaError",
    "Engine",
    "InputError",
    "KVCache",
    "Limits",
    "ModelConfig",
    "Request",
    "Result",
    "SamplingParams",
    "TokenizerError",
    "__version__",
    "load_model",
    "save_model",
]

if TYPE_CHECKING:
    from diffusiongemma.checkpoint import load_model, save_model
    from diffusiongemma.config import ModelConfig
    from diffusiongemma.engine import Engine, Limits, Request, Result, SamplingParams
    from diffusiongemma.errors import (
        CacheError,
        CheckpointError,
        ConfigError,
        DeviceError,
        DiffusionGemmaError,
        InputError,
        TokenizerError,
    )
    from diffusiongemma.model import DiffusionGemma, KVCache


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
