"""Kernels of a recorded step are told apart, in the order in which the fused network launches them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from diffusiongemma import ops
from diffusiongemma.bench.floor import ATTENTION, CONDITIONING, DENSE, EXPERTS, REST, VOCABULARY
from diffusiongemma.bench.kernels import PRODUCT, Launch, assign, families, from_trace, summarise
from diffusiongemma.ops import product_cuda, sides
from diffusiongemma.ops.product_cuda import Tile

VENDOR = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"
TORCH = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
BEGIN = [
    ("_draws_kernel", VOCABULARY), (TORCH, REST), ("_rows_kernel", REST), ("product_kernel", CONDITIONING),
    (VENDOR, CONDITIONING), (TORCH, REST), ("_rows_kernel", REST), ("_rope_kernel", ATTENTION),
    ("_rope_kernel", ATTENTION), ("_rows_kernel", REST),
]  # fmt: skip
HEADS = [
    (VENDOR, ATTENTION), ("_heads_kernel", ATTENTION), ("_attend_kernel", ATTENTION), ("_join_kernel", ATTENTION),
    ("_rows_kernel", REST), ("product_kernel", ATTENTION), ("_after_attention_kernel", REST),
]  # fmt: skip
MLP = [("product_kernel", DENSE), ("product_kernel", DENSE)]
SPARSE = [
    ("_scores_kernel", REST), ("_pick_kernel", REST), ("route_kernel", EXPERTS), ("product_kernel", EXPERTS),
    ("product_kernel", EXPERTS), ("combine_kernel", EXPERTS), ("_after_feed_forward_kernel", REST),
]  # fmt: skip
END = [
    ("_rows_kernel", REST), (VENDOR, VOCABULARY), ("_weigh_kernel", VOCABULARY), ("_result_kernel", VOCABULARY),
    ("_rescale_kernel", VOCABULARY), (VENDOR, VOCABULARY), (TORCH, REST),
]  # fmt: skip
ONE = [  # a layer of a few tokens, one a row
    ("few_kernel", ATTENTION), ("_heads_kernel", ATTENTION), ("_attend_kernel", ATTENTION), ("_join_kernel", ATTENTION),
    ("few_kernel", ATTENTION), ("route_one_kernel", REST), ("few_kernel", EXPERTS), ("few_kernel", EXPERTS),
    ("_after_feed_forward_kernel", REST),
]  # fmt: skip
LAYERS = 3


def launches(overlap: bool, steps: int = 2) -> tuple[list[Launch], list[str]]:
    """On one stream, one kernel after another; or with the MLP beside router and experts on a stream of its own."""
    found: list[tuple[Launch, str]] = []
    now = 0.0

    def put(names: list[tuple[str, str]], stream: int, at: float, length: float) -> float:
        for name, part in names:
            found.append((Launch(name, stream, at, length), part))
            at += length
        return at

    for _ in range(steps):
        now = put(BEGIN, 7, now, 1.0)
        for _ in range(LAYERS):
            now = put(HEADS, 7, now, 1.0)
            if overlap:
                put(MLP, 13, now + 0.5, 2.0)
            else:
                now = put(MLP, 7, now, 1.0)
            now = put(SPARSE, 7, now, 1.0)
        now = put(END, 7, now, 1.0) + 0.25
    found.sort(key=lambda item: item[0].start)
    return [launch for launch, _ in found], [part for _, part in found]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_kernel_finds_its_part(overlap: bool) -> None:
    ran, wanted = launches(overlap)
    assert assign(ran, LAYERS) == wanted


def test_a_layer_of_a_few_tokens() -> None:
    """Products behind the last layer are the head's."""
    step = [("_rope_kernel", ATTENTION), ("_rows_kernel", REST), *LAYERS * ONE, (VENDOR, VOCABULARY)]
    ran = [Launch(name, 7, float(at), 1.0) for at, (name, _) in enumerate(step)]
    assert assign(ran, LAYERS) == [part for _, part in step]


def test_summary_is_of_one_step() -> None:
    ran, _ = launches(overlap=False)
    profile = summarise(ran, LAYERS, 2)
    assert profile.parts[EXPERTS] == pytest.approx(LAYERS * 4 / 1e3)
    assert profile.parts[ATTENTION] == pytest.approx((2 + LAYERS * 5) / 1e3)
    assert profile.idle_ms == pytest.approx(0.25 / 2 / 1e3, abs=1e-4)
    (first,) = [k for k in profile.kernels if k["kernel"] == "product_kernel" and k["part"] == EXPERTS]
    assert (first["calls"], first["us"]) == (2 * LAYERS, 2.0 * LAYERS)


def test_overlap_is_charged_once() -> None:
    """A kernel that began early and waited, and one beside a longer one, take no time of their own."""
    ran = [Launch("route_kernel", 7, 0.0, 10.0), Launch("product_kernel", 7, 4.0, 16.0), Launch(VENDOR, 13, 5.0, 3.0),
           Launch("combine_kernel", 7, 21.0, 2.0)]  # fmt: skip
    profile = summarise(ran, LAYERS, 1)
    assert profile.parts == {EXPERTS: 0.022, DENSE: 0.0}
    assert profile.idle_ms == 0.001


def test_products_in_cuda_belong_where_others_do() -> None:
    names = {"product_kernel": "product_cuda_kernel", VENDOR: "product_cuda_kernel"}
    ran, wanted = launches(overlap=True)
    assert assign([replace(launch, name=names.get(launch.name, launch.name)) for launch in ran], LAYERS) == wanted


def test_kernels_in_cuda_are_found_by_their_files() -> None:
    """… which say `name_cuda_kernel(`"""
    found = {name: part for name, part in families().items() if name.endswith("_cuda_kernel")}
    assert found == {"product_cuda_kernel": PRODUCT, "sides_cuda_kernel": REST}
    assert {product_cuda.kernel_of(Tile(64, 88, 8)).function, sides.kernel_of().function} == found.keys()
    sources = "".join(file.read_text() for file in Path(ops.__path__[0]).glob("*.cu"))
    assert set(re.findall(r"__global__ void[^;{]*?(\w+)\((?:const|u32)", sources)) == found.keys(), (
        "one has another name"
    )


def test_kernels_that_announce_a_part_exist() -> None:
    """Renamed ones would put products into the wrong part without a word."""
    marks = {
        "_rope_kernel",
        "_after_attention_kernel",
        "_scores_kernel",
        "route_kernel",
        "_after_feed_forward_kernel",
        "route_one_kernel",
    }
    names = {name for name, _ in [*BEGIN, *HEADS, *MLP, *SPARSE, *END, *ONE]} - {VENDOR, TORCH}
    assert marks | names <= families().keys()
    streamed = {families()[f"{name}_kernel"] for name in ("experts", "pairs", "wide")}
    assert streamed == {EXPERTS}, "those of experts which are streamed, in Gluon"


def test_trace_of_the_profiler() -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "b", "ts": 5, "dur": 2.5, "args": {"stream": 7, "grid": [1, 1, 1]}}
    events = [kernel, {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 1, "dur": 1, "args": {"stream": 7}}]
    events += [kernel | {"name": "a", "ts": 1}, {"ph": "M", "name": "process_name", "args": {}}]
    assert from_trace({"traceEvents": events}) == [Launch("a", 7, 1.0, 2.5), Launch("b", 7, 5.0, 2.5)]


def test_attention_is_attention_in_any_branch_of_a_graph() -> None:
    """Where something runs beside the product behind attention, the profiler may put either on another stream."""
    done, want = launches(overlap=True)
    moved = [
        Launch(launch.name, 21, launch.start, launch.length) if done[i - 2].name == "_join_kernel" else launch
        for i, launch in enumerate(done)
    ]
    assert any(launch.stream == 21 for launch in moved)
    assert assign(moved, LAYERS) == want
