"""The mathematics of one denoising step, as small frozen objects on plain tensors."""

from diffusiongemma.diffusion.acceptance import Acceptance, ConfidenceThreshold, EntropyBound
from diffusiongemma.diffusion.beliefs import Beliefs, read_logits
from diffusiongemma.diffusion.canvas import Canvas
from diffusiongemma.diffusion.constraints import Constraint, Forbidden, Pins
from diffusiongemma.diffusion.denoiser import Denoiser
from diffusiongemma.diffusion.noise import Draws, SeededDraws
from diffusiongemma.diffusion.schedule import LinearTemperature
from diffusiongemma.diffusion.stopping import StableAndConfident

__all__ = [
    "Acceptance",
    "Beliefs",
    "Canvas",
    "ConfidenceThreshold",
    "Constraint",
    "Denoiser",
    "Draws",
    "EntropyBound",
    "Forbidden",
    "LinearTemperature",
    "Pins",
    "SeededDraws",
    "StableAndConfident",
    "read_logits",
]
