"""What some cards can do (`ops/kernels.py`), for scripts that are told to do as if there were one."""

from diffusiongemma.ops.kernels import Card

CARDS = {
    "8.9": Card((8, 9), 101_376, 128),  # RTX 4090
    "9.0": Card((9, 0), 232_448, 132),  # H200
    "12.0": Card((12, 0), 101_376, 170),  # RTX 5090
}
