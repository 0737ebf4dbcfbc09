"""Every mistake a user can make raises one of these; each message says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Sequence


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


class DeviceError(DiffusionGemmaError):
    """The asked-for device or number format does not work on this machine."""


class SvgError(ProblemsError, ValueError):
    """SVG markup that cannot be read, is not safe to read, or cannot be drawn."""
