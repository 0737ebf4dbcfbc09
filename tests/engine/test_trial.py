"""A card that nobody has tried: a kernel that is wrong, or fails, is found before the engine relies on it."""

from ops.triton_cpu import DEVICE  # noqa: F401  # isort: skip

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffusiongemma.config import FULL, SLIDING, ModelConfig
from diffusiongemma.engine import Limits, slate, trial
from diffusiongemma.engine import fast as fast_module
from diffusiongemma.errors import DeviceError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.model.backend import Ops, torch_ops, triton_ops
from diffusiongemma.model.compared import Compared, Wrong, _compare, names
from diffusiongemma.model.quantize import Scheme, random_network
from diffusiongemma.ops import kernels
from diffusiongemma.ops.tiles import block_rows

CONFIG = ModelConfig.preset(
    "tiny", vocab_size=384, hidden_size=128, intermediate_size=64, moe_intermediate_size=64, head_dim=16,
    global_head_dim=32, num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, num_experts=16,
    top_k_experts=2, sliding_window=8, canvas_length=8, num_hidden_layers=3, eos_token_ids=(1,),
    layer_types=(SLIDING, SLIDING, FULL),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PROMPT", 8)
    monkeypatch.setattr(slate, "LEAST", 8)
    monkeypatch.setattr(trial, "_found", {})
    monkeypatch.setattr(trial, "LARGE", (1, 2))


def network(kind: str | None = None) -> DiffusionGemma:
    scheme = None if kind is None else Scheme.parse(kind, 64 if kind == "int4" else None)
    return random_network(CONFIG, scheme, std=0.1)


def spoilt(ops: Ops, name: str, spoil: Callable[[Any], Any]) -> Ops:
    kernel = getattr(ops, name)
    changed: dict[str, Any] = {name: lambda *args, **options: spoil(kernel(*args, **options))}
    return replace(ops, **changed)


def one_row(result: torch.Tensor) -> torch.Tensor:
    """One number in a row of many is not what it should be"""
    result[-1, 0] += 40 * result.abs().max()
    return result


@pytest.mark.parametrize("kind", ["int4"])  # with fp8 and int8 beside it; others pass, too, and take as long
def test_right_kernels_pass_and_every_operation_is_called(kind: str | None) -> None:
    model = network(kind)
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    compared = Compared(triton_ops(), torch_ops())
    trial._try(model, triton_ops(), compared.ops())
    assert compared.called == set(names(compared.kernels))
    after = model.state_dict()  # as it was: the plain network must still be able to run
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == at and torch.equal(after[name], t) for name, (at, t) in before.items())


WRONG: dict[str, Callable[[Any], Any]] = {
    "linear": one_row,
    "experts": lambda pairs: pairs * 1.2,
    "norm_rows": lambda rows: replace(rows, values=rows.values * torch.nan),
    "route": lambda found: (found[0].flip(0), found[1]),
    "draws": lambda found: (found[0], found[1] + 1),
    "vocab_end": lambda reading: replace(reading, argmax=reading.argmax + 1),
    "place": lambda found: (found[0], found[1] * 1.2, found[2]),
    "split_heads": lambda heads: (heads[0], heads[1], heads[2].flip(0)),
    "rope_at": lambda rope: (rope[1], rope[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_is_named(name: str) -> None:
    told = trial.failed(network(), spoilt(torch_ops(), name, WRONG[name]))
    assert told is not None
    assert told.startswith(
        f"{name} picks " if name == "route" else f"{name} is not what torch makes of the same numbers: "
    )


@pytest.mark.parametrize("name", ["store", "decide", "attend"])
def test_what_is_written_beside_a_result_is_looked_at(name: str) -> None:
    """A kernel that writes nothing"""
    idle: dict[str, Any] = {name: lambda *args: None}
    if name == "attend":
        idle = {name: lambda *args, keep=False: torch_ops().attend(*args)}
    told = trial.failed(network(), replace(torch_ops(), **idle))
    assert told is not None
    assert told.startswith("decide is" if name == "decide" else "store is")


def test_an_exception_is_told_with_the_operation() -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    told = trial.failed(network(), replace(torch_ops(), geglu=broken))
    assert told == "geglu failed: RuntimeError: out of resource: shared memory"


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "route": lambda found: (found[0] + 10**6, found[1]),
    "route_one": lambda found: (*found[:3], found[3] - 10**6, found[4]),
    "counts": lambda found: (*found[:2], replace(found[2], counts=found[2].counts + 10**6)),
    "lists": lambda found: (*found[:2], replace(found[2], lists=found[2].lists - 10**6)),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_numbers_that_are_none_are_not_read_by(what: str) -> None:
    """On a card that would end all of its work, and with it the start, where the plain path would have done."""
    name = "place" if what in ("counts", "lists") else what
    told = trial.failed(network(), spoilt(replace(torch_ops(), few=1), name, OUTSIDE[what]))
    assert told is not None
    assert " are not all numbers from 0 to " in told


def test_no_memory_to_try_them_says_nothing_about_the_card() -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = network()
    told = trial.failed(model, replace(torch_ops(), experts=full))
    assert told == "there is no memory to try them: experts failed: OutOfMemoryError: CUDA out of memory"
    assert trial.failed(model, torch_ops()) is None, "another time there is some"


@pytest.mark.parametrize(("ties", "passes"), [(1, True), (2, True), (99, False)])
def test_a_single_token_may_be_another_but_not_always(ties: int, passes: bool) -> None:
    left = [ties]

    def other(reading: Any) -> Any:
        if len(reading.argmax) > 1 or not left[0]:
            return reading
        left[0] -= 1
        return replace(reading, argmax=reading.argmax + 1)

    told = trial.failed(network(), spoilt(torch_ops(), "vocab_end", other))
    assert (told is None) == passes


def test_experts_of_long_prompts_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tried = {slate.LEAST * times for times in trial.LARGE}
    experts, top_k = (getattr(ModelConfig.preset("26b-a4b"), name) for name in ("num_experts", "top_k_experts"))
    for fmt in ("fp8", "bf16", "pairs"):
        blocks = {tokens: block_rows(tokens * top_k, experts, fmt) for tokens in (*tried, *range(65, 4097))}
        beside = {blocks[tokens] for tokens in (*tried, 256, 512)}  # a canvas, and a block before it
        assert {blocks[tokens] for tokens in range(65, 4097)} <= beside, fmt
    seen = set[int]()
    monkeypatch.setattr(trial, "PROMPT", 8)
    monkeypatch.setattr(slate, "LEAST", 8)
    counted = replace(torch_ops(), experts=lambda x, *rest: seen.add(len(x.values)) or torch_ops().experts(x, *rest))
    trial._try(network(), counted, counted)
    assert seen >= {8 * times for times in trial.LARGE}


def test_a_card_that_is_lost_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_lost", lambda device: True)

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceError, match="attend failed.*kernels=False"):
        trial.failed(network(), replace(torch_ops(), attend=broken))


def test_it_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Ops]()
    monkeypatch.setattr(trial, "_failed", lambda model, ops: tried.append(ops))
    model, ops = network(), torch_ops()
    assert trial.failed(model, ops) is None
    assert trial.failed(model, ops) is None
    assert len(tried) == 1
    for group in (32, 64):  # other kernels
        trial.failed(random_network(CONFIG, Scheme.parse("int4", group), std=0.1), ops)
    assert len(tried) == 3


class Chosen:
    """What is wanted of a runner here"""

    def __init__(self, model: Any, *args: Any) -> None:
        self.model = model


class Fast(Chosen):
    pass


@pytest.mark.parametrize(
    ("found", "untried", "insist", "chosen"),
    [
        ("linear is wrong", True, None, Chosen),
        (None, True, None, Fast),
        ("linear is wrong", False, None, Fast),  # Hopper: nobody asks
        ("linear is wrong", True, True, Fast),
    ],
)
def test_the_engine_does_without_kernels_that_failed_and_says_so(
    found: str | None, untried: bool, insist: bool | None, chosen: type[Chosen],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    asked, inside = list[Any](), list[torch.device]()

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            inside.append(self.device)

        def __exit__(self, *_: object) -> None:
            inside.pop()

    def failed(model: Any, ops: Ops) -> str | None:
        assert inside == [model.device], "Triton would launch its kernels elsewhere"
        asked.append(model)
        return found

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(trial, "failed", failed)
    for name, stand_in in {"Runner": Chosen, "FastRunner": Fast, "unsupported": lambda model: None}.items():
        monkeypatch.setattr(fast_module, name, stand_in)
    monkeypatch.setattr(fast_module, "untried", lambda device: untried)
    model: Any = SimpleNamespace(device=torch.device("cuda:1"))
    runner = fast_module.choose_runner(model, Limits(), insist)
    assert type(runner) is chosen
    assert len(asked) == (untried and insist is None)
    if chosen is Chosen:
        assert "linear is wrong" in caplog.text
        assert "Engine(kernels=True) takes them all the same" in caplog.text


def test_which_cards_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kernels.untried(torch.device("cpu"))
    for capability, new in (((8, 9), True), ((9, 0), False), ((10, 0), True), ((12, 0), True)):
        monkeypatch.setattr(kernels, "card", lambda device, c=capability: kernels.Card(c, 99 << 10, 128))
        assert kernels.untried(torch.device("cuda")) is new


def test_a_tie_of_nearly_sure_tokens_that_is_broken_otherwise_is_no_fault() -> None:
    """On an H200 logprobs of 1e-4 beside one of -12 were off by 17,000% of their norm."""
    want = torch.full((40,), -1e-4)
    got = want.clone()
    got[:4] = -12.0
    tokens = torch.zeros(40, dtype=torch.int64)
    reading = {"sample": tokens, "entropy": want, "logprob": want, "sample_logprob": want}
    _compare("vocab_end", {**reading, "sample_logprob": got}, reading)
    for name, rows in (("sample_logprob", 11), ("entropy", 3), ("logprob", 3)):
        off = want.clone()
        off[:rows] = torch.nan
        with pytest.raises(Wrong, match=f"{name} is near in "):
            _compare("vocab_end", {**reading, name: off}, reading)
