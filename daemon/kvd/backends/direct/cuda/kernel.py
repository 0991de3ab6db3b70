"""The one kernel of direct reads between GPUs: applies a plan, straight from numbers of blocks, to the peer's memory.

Imported only in a process that has CUDA memory registered: it needs Triton, which vLLM brings along.
"""

import triton
import triton.language as tl


@triton.jit
def _place(
    table,
    words,
    rows,
    segments,
    tiles,
    tile,
    at,
    piece,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Of each piece of a tile: where its bytes go, where they are, how many times ``STEP`` bytes.

    These are none of a piece that there is not, and of a tile after the last one. ``at`` is a segment at or before the
    tile's own, which is given too; its words are those of `kvd.backends.direct.cuda.tables.SEGMENT_WORDS`.
    """
    # Segments stand in the order of their tiles, and the tiles of a program count up.
    more = at + 1 < segments
    while more:
        following = tl.load(words + (at + 1) * 8, mask=at + 1 < segments, other=0x7FFFFFFF)
        more = following <= tile
        at += more.to(tl.int32)
    segment = words + at * 8
    some = tile < tiles
    number = (tile - tl.load(segment, mask=some, other=0)) * PIECES + piece
    inside = number < tl.load(segment + 1, mask=some, other=0)
    per = tl.load(segment + 2, mask=some, other=1)
    blocks = tl.load(segment + 3, mask=some, other=1)
    first_row = tl.load(segment + 4, mask=some, other=0)
    step = tl.load(segment + 5, mask=some, other=0)
    ids = tl.load(segment + 6, mask=some, other=0)
    apart = tl.load(segment + 7, mask=some, other=0)
    cell = number // per
    begun = (number - cell * per).to(tl.int64) * WIDTH
    nth = cell // blocks
    listed = words + ids + (cell - nth * blocks)
    block = tl.load(listed, mask=inside, other=0).to(tl.int64)
    remote_block = tl.load(listed + apart, mask=inside, other=0).to(tl.int64)
    column = table + first_row + nth * step
    to = tl.load(column, mask=inside, other=0) + block * tl.load(column + 3 * rows, mask=inside, other=0)
    source = tl.load(column + rows, mask=inside, other=0)
    source += remote_block * tl.load(column + 4 * rows, mask=inside, other=0)
    left = tl.load(column + 2 * rows, mask=inside, other=0) - begun
    steps = (tl.minimum(tl.where(inside, left, 0), WIDTH) // STEP).to(tl.int32)
    return to + begun, source + begun, steps, at


# Numbers differ from request to request; a kernel compiled anew for each that is one or a multiple of 16 would be
# compiled while a request waits.
@triton.jit(do_not_specialize=["rows", "segments", "tiles"])
def gather(
    table,
    words,
    rows,
    segments,
    tiles,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Copy all tiles of a job; program ``p`` of ``n`` takes tiles ``p``, ``p + n``, ...

    ``table`` is five columns of ``rows`` int64 words (`kvd.backends.direct.cuda.tables.Rows`), ``words`` int32 words:
    ``segments`` of them, then the block ids that they name. A tile is ``PIECES`` pieces of ``WIDTH`` bytes, moved as
    items of ``ITEM`` bytes, ``LANES`` of them side by side; all addresses, strides and lengths are multiples of
    ``ITEM * LANES``.
    """
    if ITEM == 8:
        kind = tl.pointer_type(tl.int64)
    elif ITEM == 4:
        kind = tl.pointer_type(tl.int32)
    else:
        kind = tl.pointer_type(tl.int8)
    piece = tl.arange(0, PIECES)
    item = tl.arange(0, WIDTH // ITEM)
    tile = tl.program_id(0)
    stride = tl.num_programs(0)
    at = tile * 0
    to, source, steps, at = _place(
        table, words, rows, segments, tiles, tile, at, piece, ITEM * LANES, WIDTH, PIECES
    )
    while tile < tiles:
        target = tl.multiple_of(to.to(kind), ITEM * LANES)
        origin = tl.multiple_of(source.to(kind), ITEM * LANES)
        wanted = item[None, :] < (steps * LANES)[:, None]
        got = tl.load(origin[:, None] + item[None, :], mask=wanted, cache_modifier=".cg")
        # The next tile is found while the bytes of this one are on their way.
        tile += stride
        to, source, steps, at = _place(
            table, words, rows, segments, tiles, tile, at, piece, ITEM * LANES, WIDTH, PIECES
        )
        tl.store(target[:, None] + item[None, :], got, mask=wanted)
