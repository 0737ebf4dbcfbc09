"""Every mistake a user can make raises one of these; each message says what is wrong and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class DiffusionGemmaError(Exception):
    """Base of all errors that this package raises on purpose."""


class ProblemsError(DiffusionGemmaError):
    """An error that lists everything found wrong, not only the first thing."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([summary, *self.problems]))


class ConfigError(ProblemsError, ValueError):
    """A model or sampling configuration that cannot be honoured."""


class CheckpointError(ProblemsError):
    """Files that are missing, damaged, or not a DiffusionGemma checkpoint."""


class TokenizerError(ProblemsError):
    """A tokenizer or chat template that is missing, damaged or refuses its input."""


class DataError(ProblemsError):
    """Training or evaluation data that is missing, damaged or not what its list promises."""


class CacheError(DiffusionGemmaError, ValueError):
    """A K/V cache used beyond what it holds."""


class InputError(DiffusionGemmaError, ValueError):
    """Tensors or options handed to the network that it cannot take."""


class LengthError(InputError):
    """A prompt and an answer that are longer together than the model's positions."""


class DeviceError(DiffusionGemmaError):
    """The asked-for device or number format does not work on this machine."""


class SvgError(ProblemsError, ValueError):
    """SVG markup that cannot be read, is not safe to read, or cannot be drawn."""


def check_writable(path: Path) -> Path:
    """Refuse a file that cannot be written before the work whose outcome it is to hold, not after it."""
    try:
        folder = path.absolute().parent
        if not folder.is_dir():
            raise InputError(f"the folder {folder} does not exist: make it first")
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder; name a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"cannot write {path}: that is not allowed; name another file")
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise InputError(f"cannot write {path}: {error.strerror}; name another file") from None
    return path
