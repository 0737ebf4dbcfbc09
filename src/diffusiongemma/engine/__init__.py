"""Requests → scheduler → runner → events: many canvases at once, each as if it were alone."""

from diffusiongemma.engine.candidates import Candidate
from diffusiongemma.engine.edit import EditResult
from diffusiongemma.engine.engine import Engine, collect
from diffusiongemma.engine.events import Commit, Draft, End, Event, Metrics, Result, TokenLogprob
from diffusiongemma.engine.fill import FillResult, Hole
from diffusiongemma.engine.infill import InfillResult
from diffusiongemma.engine.params import SamplingParams
from diffusiongemma.engine.request import Request
from diffusiongemma.engine.scheduler import Limits
from diffusiongemma.engine.start import prepare

__all__ = [
    "Candidate",
    "Commit",
    "Draft",
    "EditResult",
    "End",
    "Engine",
    "Event",
    "FillResult",
    "Hole",
    "InfillResult",
    "Limits",
    "Metrics",
    "Request",
    "Result",
    "SamplingParams",
    "TokenLogprob",
    "collect",
    "prepare",
]
