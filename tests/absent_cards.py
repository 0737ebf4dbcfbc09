"""Cards that are not there: as much of torch as choosing one of them needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._utils import _get_device_index


class Cards:
    """Two, of which the second is the current one. `chosen`: those that `set_device` was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.chosen = 1, list[int]()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch, "zeros", self.zeros)

    def set_device(self, device: torch.device | str | int) -> None:
        self.current = _get_device_index(device)  # torch's own, which refuses a device without an index
        self.chosen.append(self.current)

    def zeros(self, *size: int, device: torch.device | str) -> SimpleNamespace:
        """A tensor knows on which card it is, also if nobody has said it."""
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", self.current)
        return SimpleNamespace(device=where, tolist=list)
