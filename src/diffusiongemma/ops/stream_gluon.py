# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"
# ruff: noqa: RUF059  (a message has four numbers, and not every part needs them all)
"""What the parts of kernels that stream experts have in common (`experts_gluon.py`, `pairs_gluon.py`, `wide_gluon.py`
with tiles in pairs): the order of the tiles, the mailboxes by which a part learns what comes next, the rounding of rows
between the two products. What comes before the mailboxes, all kernels in Gluon share.

A tile is 64 outputs of the first product with their gates, or 128 of the second, of one block of rows. Tiles are
numbered: first those of the first product, block by block, then those of the second. A program takes the next number
whenever it has room, so that programs which wait longer for memory do less. The second product waits for tiles with
lower numbers only, which running programs have taken; who rounds may wait for tiles that nobody has taken yet, but
holds nobody up until ROUNDS more are told. So, however many programs the card runs at once, the work ends. (Where
weights are laid out by side, numbers are taken as `sides_gluon.py` says.)

In Gluon, Triton's lower level, because each warp has its own work here: one keeps asking for weights, without pause.

Legend: D hidden, I width of an expert, T rows of a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from diffusiongemma.ops.sides_gluon import first_of, next_of, own_side

# Names that Triton has changed since 3.6: a barrier of one part's warps, copies to shared memory, by threads and of
# whole tiles, and another shape of that.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
bulk_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

MOST = gl.constexpr(2)  # tiles that are known ahead
# The same for who rounds: more than a block has tiles of the first product (`experts_triton.WIDEST`), for a block is
# rounded when all of them are there, and one program may have to make them all.
ROUNDS = gl.constexpr(16)


@gluon.jit
def as_shape(memory, shape: gl.constexpr):
    """The same shared memory in another shape"""
    if _REINTERPRET:
        return memory.reinterpret(memory.dtype, shape, memory.layout)
    else:
        return memory._reinterpret(memory.dtype, shape, memory.layout)


@gluon.jit
def wait_before():
    """Until the launch before has ended, and what it wrote is there"""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next():
    """The launch behind this one may begin where there is room"""
    LET: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(LET, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_global():
    """What others wrote may now be read by bulk copies"""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring, and whether its barriers are in an odd turn"""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, FILL: gl.constexpr, USE: gl.constexpr):
    """-> for each stage of a ring whether it is ready, when FILL have filled it, and free, when USE have used it"""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=FILL)
        mbarrier.init(free.index(n), count=USE)
    return ready, free


@gluon.jit
def brought(ready, done, LEFT: gl.constexpr, STAGES: gl.constexpr):
    """By a warp that brings rows: all copies are there but those of the last LEFT stages, so one more stage is told"""
    async_copy.wait_group(LEFT)
    fence_async_shared()  # for the tensor cores
    barrier()
    mbarrier.arrive(ready.index(done), count=32)
    done += 1
    if done == STAGES:
        done = 0
    return done


# ---- mailboxes ---------------------------------------------------------------------------------------------------


@gluon.jit
def mailbox(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """-> messages, and for each whether it was told, and heard by all. A part must have it: Triton gives the memory of
    barriers that nobody uses to others, and the card now and then writes a barrier back over what they left there."""
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(told.index(n), count=1)
        mbarrier.init(heard.index(n), count=READERS)
    return gl.allocate_shared_memory(gl.int32, [SLOTS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0])), told, heard


@gluon.jit
def hear(box, told, heard, slot, phase, SLOTS: gl.constexpr):
    """The next message: number of a tile or -1, first row and end of its block, its first place in the ring"""
    lay: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    mbarrier.wait(told.index(slot), phase)
    message = box.index(slot).load(lay)
    n = gl.arange(0, 4, lay)
    at = gl.sum(gl.where(n == 0, message, 0), 0)
    start = gl.sum(gl.where(n == 1, message, 0), 0)
    end = gl.sum(gl.where(n == 2, message, 0), 0)
    place = gl.sum(gl.where(n == 3, message, 0), 0)
    mbarrier.arrive(heard.index(slot), count=1)
    slot, phase = following(slot, phase, SLOTS)
    return at, start, end, place, slot, phase


@gluon.jit
def begin(box, told, heard, counts, EXPERTS: gl.constexpr, UP: gl.constexpr):
    """When the launch before has ended: how many tiles the first product has, and then as `hear`, the first message"""
    slot = 0
    turn = 0
    wait_before()
    ups = (EXPERTS + gl.load(counts + EXPERTS)) * UP
    at, start, end, place, slot, turn = hear(box, told, heard, slot, turn, MOST)
    return ups, at, start, end, place, slot, turn


@gluon.jit
def tell(box, told, heard, slot, phase, at, start, end, place, SLOTS: gl.constexpr):
    lay: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    n = gl.arange(0, 4, lay)
    mbarrier.wait(heard.index(slot), phase)
    box.index(slot).store(gl.where(n == 0, at, gl.where(n == 1, start, gl.where(n == 2, end, place))))
    mbarrier.arrive(told.index(slot), count=1)
    return following(slot, phase, SLOTS)


# ---- parts of one warp -------------------------------------------------------------------------------------------


@gluon.jit
def plan_part(box, told, heard, guess, guessed, unused, later, later_told, later_heard, counts, beyond, marks, sides,
              each, UP: gl.constexpr, DOWN: gl.constexpr, UP_STEPS: gl.constexpr, DOWN_STEPS: gl.constexpr,
              EXPERTS: gl.constexpr, T: gl.constexpr, ROUND: gl.constexpr):  # fmt: skip
    """Takes numbers of tiles and tells them. UP, DOWN: tiles of a block; UP_STEPS, DOWN_STEPS: stages of a tile. The
    first number is told to who asks for weights before anything else is known. `sides`: of the multiprocessors, where
    weights are laid out by side, or None"""
    slot = 0
    phase = 1
    later_slot = 0
    later_phase = 1
    place = 0
    # Written before the launches before have ended: no other kernel knows `marks`, and they are zero since long.
    if sides is not None:
        side = own_side(sides)
        at = first_of(marks, side)
    else:
        at = gl.atomic_add(marks, 1, sem="relaxed", scope="gpu")
    tell(guess, guessed, unused, slot, phase, at, 0, 0, 0, 1)
    wait_before()
    blocks = EXPERTS + gl.load(counts + EXPERTS)
    ups = blocks * UP
    downs = blocks * DOWN
    asked = at < EXPERTS * UP  # then its weights are on their way, rows or none
    queue = gl.to_tensor(0)
    taken = gl.to_tensor(1)
    alone = gl.to_tensor(False)
    if sides is not None:  # noqa: SIM102
        if at >= ups:
            at, queue, taken, alone = next_of(marks, side, queue, taken, alone, ups, downs)
    while (at >= 0) & (at < ups + downs):
        block = gl.where(at < ups, at // UP, (at - ups) // DOWN)
        expert = block
        start = block * each
        if block >= EXPERTS:
            start = gl.load(beyond + block - EXPERTS)
            expert = start // each
        end = gl.minimum(expert * each + gl.load(counts + expert), start + T)
        if (start < end) | asked:
            slot, phase = tell(box, told, heard, slot, phase, at, start, end, place, MOST)
            if ROUND:  # noqa: SIM102  (what is known before the launch and what is not stay apart)
                if at < ups:
                    later_slot, later_phase = tell(later, later_told, later_heard, later_slot, later_phase, at, start,
                                                   end, place, ROUNDS)  # fmt: skip
            place += gl.where(at < ups, UP_STEPS, DOWN_STEPS)
        asked = False
        if sides is not None:
            at, queue, taken, alone = next_of(marks, side, queue, taken, alone, ups, downs)
        else:
            at = gl.atomic_add(marks, 1, sem="relaxed", scope="gpu")
    tell(box, told, heard, slot, phase, -1, 0, 0, 0, MOST)
    if ROUND:
        tell(later, later_told, later_heard, later_slot, later_phase, -1, 0, 0, 0, ROUNDS)


@gluon.jit
def idle_part():
    """A warp that has nothing to do: PTX wants all four of a group to take, and give back, their registers together"""
    wait_before()


@gluon.jit
def gated(one, two):
    """gelu(one) x two"""
    y = 1.5957691216057308 * (one + 0.044715 * one * one * one)
    return one * (1 / (1 + gl.exp(-y))) * two


@gluon.jit
def store_rows(sums, to, ok, wide: gl.constexpr):
    """sums [64, T] -> T rows of 64 bfloat16 numbers, which are to stay in the L2 cache until they are read, though
    hundreds of megabytes of weights go through it"""
    rows = gl.convert_layout(gl.permute(sums.to(gl.bfloat16), (1, 0)), wide)
    gl.store(to, rows, mask=ok, eviction_policy="evict_last")


@gluon.jit
def round_part(hidden, rounded, h_scale, later, told, heard, flags, I: gl.constexpr, APART: gl.constexpr,
               WIDTH: gl.constexpr, UP: gl.constexpr):  # fmt: skip
    """Rounds rows of `hidden` to fp8, where they lie: of the block of each tile that this program made, every UP-th
    row, beginning with the tile's own, as soon as all tiles of the block are there. In pieces of WIDTH, a power of two.
    As `rows_triton.quantize_kernel`"""
    lay: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    slot = 0
    phase = 0
    c = gl.arange(0, WIDTH, lay)
    zero = gl.zeros([WIDTH], gl.float32, lay)
    wait_before()
    at, start, end, place, slot, phase = hear(later, told, heard, slot, phase, ROUNDS)
    while at >= 0:
        if start < end:
            block = at // UP
            while gl.atomic_add(flags + block, 0, sem="acquire", scope="gpu") < UP:
                pass
            for row in range(start + at % UP, end, UP):
                line = hidden + row.to(gl.int64) * I
                top = zero
                for n in gl.static_range(0, I, WIDTH):
                    wide = gl.load(line + n + c, mask=n + c < I, other=0.0, cache_modifier=".cg").to(gl.float32)
                    top = gl.maximum(top, gl.abs(wide))
                s = gl.max(top, 0) / 448.0
                s = gl.where(s < 1.1754943508222875e-38, 1.0, s)
                back = gl.div_rn(1.0, s)
                gl.store(h_scale + row, s)
                # The n-th rounded number lies before the n-th that is read: later pieces are as they were.
                for n in gl.static_range(0, I, WIDTH):
                    if I > WIDTH:
                        wide = gl.load(line + n + c, mask=n + c < I, other=0.0, cache_modifier=".cg").to(gl.float32)
                        barrier()  # where one thread writes, another has read
                    near = wide * back
                    near = gl.fma(gl.fma(-near, s + zero, wide), back + zero, near)
                    gl.store(rounded + row.to(gl.int64) * APART + n + c, near.to(gl.float8e4nv), mask=n + c < I)
            barrier()
            gl.atomic_add(flags + block, 1, sem="acq_rel", scope="gpu")
        at, start, end, place, slot, phase = hear(later, told, heard, slot, phase, ROUNDS)
