"""The one kernel of direct reads between GPUs: applies a plan, straight from numbers of blocks, to the peer's memory.

Imported only in a process that has CUDA memory registered: it needs Triton, which vLLM brings along.
"""

import triton
import triton.language as tl

# The words of a segment, see kvd.backends.direct.cuda.tables.
SEGMENT_WORDS = 4


# Numbers differ from request to request; a kernel compiled anew for each that is one or a multiple of 16 would be
# compiled while a request waits.
@triton.jit(do_not_specialize=["rows", "cells", "blocks", "remote_blocks", "segments", "tiles"])
def gather(
    table,
    picks,
    rows,
    cells,
    blocks,
    remote_blocks,
    segments,
    tiles,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Copy all tiles of a job; program ``p`` of ``n`` takes tiles ``p``, ``p + n``, ...

    ``table`` is five columns of ``rows`` int64 words (`kvd.backends.direct.cuda.tables.Rows`), ``picks`` int32
    words: ``cells`` local cells, as many remote ones, then ``segments`` times `SEGMENT_WORDS`. A tile is ``PIECES``
    pieces of ``WIDTH`` bytes, moved as items of ``ITEM`` bytes, ``LANES`` of them side by side; all addresses, strides
    and lengths are multiples of ``ITEM * LANES``.
    """
    if ITEM == 8:
        kind = tl.pointer_type(tl.int64)
    elif ITEM == 4:
        kind = tl.pointer_type(tl.int32)
    else:
        kind = tl.pointer_type(tl.int8)
    header = picks + 2 * cells
    piece = tl.arange(0, PIECES)
    item = tl.arange(0, WIDTH // ITEM)
    tile = tl.program_id(0)
    step = tl.num_programs(0)
    at = 0
    while tile < tiles:
        # Segments stand in the order of their tiles, and the tiles of a program count up.
        more = at + 1 < segments
        while more:
            following = tl.load(header + (at + 1) * 4, mask=at + 1 < segments, other=tiles)
            more = following <= tile
            at += more.to(tl.int32)
        words = header + at * 4
        first_tile = tl.load(words)
        first_cell = tl.load(words + 1)
        within = tl.load(words + 2)
        per = tl.load(words + 3)
        number = (tile - first_tile) * PIECES + piece
        inside = number < within * per
        cell = first_cell + number // per
        begun = (number % per).to(tl.int64) * WIDTH
        mine = tl.load(picks + cell, mask=inside, other=0)
        theirs = tl.load(picks + cells + cell, mask=inside, other=0)
        row = mine // blocks
        block = (mine - row * blocks).to(tl.int64)
        remote_block = (theirs % remote_blocks).to(tl.int64)
        column = table + row
        to = tl.load(column) + block * tl.load(column + 3 * rows) + begun
        source = tl.load(column + rows) + remote_block * tl.load(column + 4 * rows) + begun
        left = tl.where(inside, tl.load(column + 2 * rows) - begun, 0)
        items = tl.multiple_of((tl.minimum(left, WIDTH) // ITEM).to(tl.int32), LANES)
        target = tl.multiple_of(to.to(kind), ITEM * LANES)
        origin = tl.multiple_of(source.to(kind), ITEM * LANES)
        wanted = item[None, :] < items[:, None]
        got = tl.load(origin[:, None] + item[None, :], mask=wanted, cache_modifier=".cg")
        tl.store(target[:, None] + item[None, :], got, mask=wanted)
        tile += step
