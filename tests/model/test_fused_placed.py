"""Kernels that place pairs and kernels that sort them give a whole network the same bits, alone and in a batch."""

from ops.triton_cpu import DEVICE  # isort: skip

from dataclasses import replace

import torch
from torch import Tensor

from diffusiongemma.config import FULL, SLIDING, ModelConfig
from diffusiongemma.model import CacheRow
from diffusiongemma.model.backend import triton_ops
from diffusiongemma.model.fused import Batch, FusedNetwork
from diffusiongemma.model.pool import CachePool
from diffusiongemma.model.quantize import random_network
from diffusiongemma.ops.attention_cached import New

WIDE = 16  # tokens of a canvas
CONFIG = ModelConfig.preset(
    "tiny", vocab_size=96, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
    layer_types=(SLIDING, FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_global_key_value_heads=1, global_head_dim=32, num_experts=16, top_k_experts=2, sliding_window=8,
    canvas_length=WIDE, eos_token_ids=(1,),
)  # fmt: skip


def test_placed_and_sorted_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    model = random_network(CONFIG, None, DEVICE, torch.bfloat16, std=0.05)
    pool = CachePool(CONFIG, 1 << 20, torch.bfloat16, DEVICE)
    rows = [pool.new_row(60) for _ in range(2)]
    canvas, soft = torch.randint(0, 96, (2 * WIDE,), device=DEVICE), torch.randn(2 * WIDE, 64, device=DEVICE).bfloat16()

    def denoise(placing: int, some: list[CacheRow]) -> Tensor:
        count, whole = len(some), {"dtype": torch.int32, "device": DEVICE}
        new = New(torch.arange(0, count * WIDE + 1, WIDE, **whole), WIDE)
        batch = Batch(
            pool.offsets(some).to(DEVICE), torch.zeros(count, **whole), torch.arange(WIDE, **whole).repeat(count), new,
            pool.reach_for(60),
        )  # fmt: skip
        network = FusedNetwork(model, pool, replace(triton_ops(exact=True), placing=placing))
        with torch.inference_mode():
            return network.denoise(canvas[: count * WIDE], soft[: count * WIDE], batch)

    want = denoise(0, rows)
    assert want.isfinite().all()
    assert torch.equal(denoise(512, rows), want)
    assert torch.equal(denoise(WIDE, rows[:1]), want[:WIDE])  # alone it is placed, though together they are sorted
