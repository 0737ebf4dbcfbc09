"""Which operations of a step a CPU's threads share, and which one thread does alone.

Torch shares out every operation over more than 32,768 numbers. A canvas has as many, so nearly all of a step's thousand
operations are, though one thread is through with such a one in 10 to 30 microseconds, and a thread that sleeps takes 50
to wake. (Threads that spin while they wait wake at once, but fight with whatever else runs, and OpenMP lets them spin
for next to nothing where two threads of a program have used it: whoever loads a model and the engine's own are two.)
So inside `alone` one thread does everything, but for what says by `shared` that it is worth waking the others:
products above all. Texts do not change: a row has the same bits with any number of threads. (Torch has one number of
threads for those that start later: who starts one in the middle of a pass, and multiplies there, may find it is 1.)

`docs/log.md` has the figures, `dgemma bench step --preset nano --prefix 200 --canvas 96 --steps 8` shows one: a step of
the embedded model takes half of the time over 96 positions, about 0.7 of it over 256.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LEAST = 5_000_000  # multiplications of float32 numbers: about 100 microseconds of one thread
MOST = 400_000  # numbers that a pass's tensors have: of more, most operations are worth sharing


class _Here(threading.local):
    many = 0  # threads that an operation of this one may share; 0: as torch itself would have it


_here = _Here()


@contextmanager
def alone(device: torch.device, numbers: int) -> Iterator[None]:
    """Inside, this thread works alone, but for what is `shared`: on a CPU, if tensors have no more than so many
    numbers"""
    many = torch.get_num_threads()
    if device.type != "cpu" or numbers > MOST or many == 1 or _here.many:
        yield
        return
    _here.many = many
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _here.many = 0
        torch.set_num_threads(many)


@contextmanager
def shared(work: int) -> Iterator[None]:
    """Inside `alone`: all threads take part, if there is enough to do; `work`: multiplications of float32 numbers"""
    many = _here.many
    if not many or work < LEAST:
        yield
        return
    _here.many = 0  # what is inside is shared already
    torch.set_num_threads(many)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        _here.many = many
