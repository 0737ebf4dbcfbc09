"""Recording, without a card: what is left when it fails. (On one: `scripts/check_runner.py --only blocks`.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from diffusiongemma.engine import graphs
from diffusiongemma.engine.graphs import Mailbox, Recorder


class Torch:
    """As much of torch.cuda as a recording needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
        """`ends`: can a recording that failed be ended?"""
        self.ends, self.pools, self.open, self.stream = ends, 0, set[int](), "usual"
        cuda = graphs.torch.cuda
        monkeypatch.setattr(graphs, "_memory", lambda device: self.pool())
        monkeypatch.setattr(cuda, "current_stream", lambda device: SimpleNamespace(name=self.stream, device_index=0))
        monkeypatch.setattr(cuda, "set_stream", lambda stream: setattr(self, "stream", stream.name))
        monkeypatch.setattr(cuda, "graph", self.graph)
        monkeypatch.setattr(graphs.torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def pool(self) -> SimpleNamespace:
        self.pools += 1
        return SimpleNamespace(id=self.pools)

    def end(self, device: int, pool: int) -> None:
        if pool not in self.open:
            raise RuntimeError("not currently recording")
        self.open.remove(pool)

    @contextmanager
    def graph(self, graph: object, pool: int, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert pool not in self.open, "already recording"
        self.open.add(pool)
        before, self.stream = self.stream, "recorded"
        try:
            yield
        except RuntimeError:
            if not self.ends:
                raise RuntimeError("CUDA error: capturing stream has unjoined work") from None
            self.open.remove(pool)
            self.stream = before
            raise
        self.open.remove(pool)
        self.stream = before


@pytest.mark.parametrize(("ends", "pools"), [(True, 1), (False, 2)])
def test_a_recording_that_fails_spoils_no_other(monkeypatch: pytest.MonkeyPatch, ends: bool, pools: int) -> None:
    """Where torch cannot end it, its pool would count as taken, and its stream would stay the current one."""
    fake = Torch(monkeypatch, ends)
    recorder = Recorder(torch.device("cpu"))
    recorder._pool = graphs._memory(recorder.device)
    graph = SimpleNamespace()
    with pytest.raises(RuntimeError), recorder._recording(graph):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("none left")
    assert (fake.stream, fake.open, fake.pools) == ("usual", set(), pools)
    assert len(recorder._spoilt) == pools - 1
    with recorder._recording(graph):  # type: ignore[arg-type]
        assert fake.stream == "recorded"
    assert fake.stream == "usual"


def test_a_letter_is_waited_for_on_the_card_that_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current card may be another: what is recorded there would be there at once, and old numbers read."""
    recorded = list[str]()

    class Event:
        def record(self, stream: str | None = None) -> None:
            recorded.append(stream or "that of the current card")

        def synchronize(self) -> None:
            recorded.append("waited for")

    card = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    box = Mailbox(torch.zeros(2, 3))

    class Values:
        """A tensor of that card, as far as a copy of it goes"""

        shape, device = (2, 3), card

    monkeypatch.setattr(torch.Tensor, "copy_", lambda letter, values, non_blocking: letter)
    wait = box.send(Values())  # type: ignore[arg-type]
    assert recorded == ["that of cuda:1"]
    assert wait().shape == (2, 3)
    assert recorded == ["that of cuda:1", "waited for"]
