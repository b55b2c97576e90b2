"""Scratch and results of the fused loss, allocated once, and the shapes of its chunks and tiles.

The only place that decides those shapes. Every tensor lies in `LossBuffers`, so that the operator can name all that it
writes.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dflash_graph.kernels import gemm
from dflash_graph.kernels.backend import Implementation, choose_implementation, compute_dtype

IGNORE_INDEX = -100
NO_RANK = 2**62  # label_rank of rows that do not count or hold NaN, and of wrong rows when ranks were not asked for

_ALIGN = 16  # elements; Triton's 128-bit accesses need rows that start at multiples of it
_CPU_CHUNK_ROWS = 512  # of whole rows; measured at D 576, V 4,096-49,152: 1,024 gain under 2 %, 128 lose 5-25 %
# Measured at D 576, V 49,152, one core: with 1,024 x 512 the GEMMs keep their best rate, 480 x 512 costs 4 % and
# 480 x 1,024 2 % more time, 1,024 x 1,024 saves under 1 %. A tile stays in the cache from GEMM to GEMM. oneDNN is so
# much faster that reading and writing the gradient rows for every tile counts: it wants 1,024 columns.
_CPU_TILE_ROWS = 1024
_CPU_TILE_COLUMNS = 512
_ONEDNN_TILE_COLUMNS = 1024
_SPARE_ROWS = 256  # of a tile that have a second copy at once
_GPU_TILE_COLUMNS = 8192  # plain torch on CUDA is a fallback; wide enough to keep launches few
_GPU_MULTIPROCESSORS = 132  # H100, H200; tiles of 128 x 256 in the second GEMM
_GPU_LEAST_ROWS = 1536  # below it two waves per chunk cost less than a second pass over the head


@dataclass(eq=False)
class LossBuffers:
    """All tensors of a workspace. F is float64 for float64 rows, else float32. Absent tensors have no elements.

    The results of a call with R rows are the first R entries; later entries are left alone.
    """

    scratch: Tensor  # 1-D F: logits, then gradients, of C rows (not with oneDNN); at other times C rows of D
    spare: Tensor  # (rows, T) F, plain torch only
    narrow: Tensor  # (C, T) hidden dtype, plain torch with 16 bits only
    gathered: Tensor  # (C, D) hidden dtype, plain torch with 16 bits only
    accumulated: Tensor  # (C, D) F gradient rows of a chunk, with 16 bits only (Triton: with a teacher)
    row_stats: Tensor  # (9, C, 1) F, plain torch only
    row_columns: Tensor  # (2, C, 1) int64, plain torch only
    row_flags: Tensor  # (C, 1) bool, plain torch only
    row_index: Tensor  # (R,) int64 0, 1, ...
    safe_labels: Tensor  # (R,) int64, 0 where the row does not count
    counts: Tensor  # (R,) bool, the row counts
    ignored: Tensor  # (R,) bool, its negation
    flags: Tensor  # (R,) bool
    row_values: Tensor  # (R,) F
    source_rows: Tensor  # (R,) int64, rows of the teacher or places in the blocks, 0 where the row does not count
    block_values: Tensor  # (blocks, K) F, D-PACE only
    block_flags: Tensor  # (blocks, K) bool, D-PACE only
    grad_hidden: Tensor  # (R, D) hidden dtype, gradient of each row's own loss, not yet times its weight
    nll: Tensor  # (R,) F; 0 where the row does not count
    kl: Tensor  # (R,) F, written with a teacher only; 0 where the row does not count
    logsumexp: Tensor  # (R,) F; 0 where the row does not count
    label_rank: Tensor  # (R,) int64, logits greater than the label's; NO_RANK where the row does not count or is NaN
    row_weights: Tensor  # (R,) F, weights that were used; 0 where the row does not count
    loss_sum: Tensor  # () F, sum of weight times loss
    weight_sum: Tensor  # () F, sum of row_weights


@dataclass(kw_only=True, eq=False)
class LmHeadLossWorkspace(LossBuffers):
    """Scratch and results of `fused_lm_head_loss`.

    A forward and its backward are one use: another forward with the same workspace before the backward is refused.
    """

    implementation: Implementation
    vocab_size: int  # V
    chunk_rows: int  # C, rows whose logits exist at once
    tile_columns: int  # T, columns of the logits that exist at once; V for Triton
    row_stride: int  # elements between two rows of logits in the scratch
    host_reads: bool  # the host may look at the device's numbers: the CPU only
    skips_dead_chunks: bool  # the host reads num_rows and skips dead chunks: 32 and 64 bits on the CPU only
    use: int = 0  # forwards so far
    spent: bool = False  # the backward of the last forward handed out grad_hidden itself

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of `LossBuffers`."""
        return [getattr(self, f.name) for f in fields(LossBuffers)]

    def nbytes(self) -> int:
        """Bytes of all tensors of the workspace."""
        return sum(t.nbytes for t in self.tensors())


def aligned_stride(vocab_size: int) -> int:
    """Elements from one row of logits to the next where Triton passes over them."""
    return -(-vocab_size // _ALIGN) * _ALIGN


def choose_chunk_rows(
    *,
    num_rows: int,
    hidden_size: int,
    vocab_size: int,
    row_bytes: int,
    scratch_bytes: int,
    device_type: str,
    cpu_rows: int = _CPU_CHUNK_ROWS,
) -> int:
    """C, rows of one chunk: what keeps the GEMMs busy, within `scratch_bytes` of (C, V) scratch.

    On CUDA the second GEMM, (C, V) x (V, D), should fill whole waves of the multiprocessors: C is 128 times the row
    tiles that fit one wave (two, when one is short). Computed, not measured.

    Args:
        vocab_size: columns that exist at once, padding included.
        row_bytes: scratch bytes of one logit, over all scratch buffers.
        cpu_rows: rows that suffice on the CPU.
    """
    most = max(1, scratch_bytes // (row_bytes * vocab_size))
    rows = cpu_rows
    if device_type != "cpu":
        column_tiles = -(-hidden_size // 256)
        waves = [128 * (k * _GPU_MULTIPROCESSORS // column_tiles) for k in (1, 2)]
        rows = waves[0] if waves[0] >= _GPU_LEAST_ROWS or waves[1] > most else waves[1]
        if most >= 128:
            most -= most % 128
    return max(1, min(rows, most, num_rows))


def make_workspace(
    *,
    num_rows: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    scratch_bytes: int = 768 * 2**20,
    chunk_rows: int | None = None,
    tile_columns: int | None = None,
    implementation: Implementation | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
) -> LmHeadLossWorkspace:
    """Allocate the workspace for calls of up to `num_rows` rows.

    Args:
        num_rows: R, most rows of a call. hidden_size: D. vocab_size: V, rows of the (possibly reduced) head.
        dtype: of the hidden rows and of the head.
        scratch_bytes: upper bound of the scratch that grows with the columns, bytes.
        chunk_rows: C; None chooses it.
        tile_columns: T, columns of one tile of plain torch; None chooses it. The Triton pass takes whole rows.
        implementation: of the row passes; None chooses Triton on CUDA (not for float64), else plain torch.
        num_blocks, block_size: most blocks of a call and K, both or neither; D-PACE needs them.

    Raises:
        TypeError: dtype is not float16, bfloat16, float32 or float64.
        ValueError: a size is not positive (num_rows: negative), or the implementation cannot run here.
    """
    stats = compute_dtype(dtype)
    sizes = {
        "hidden_size": hidden_size, "vocab_size": vocab_size, "chunk_rows": chunk_rows, "tile_columns": tile_columns,
        "num_blocks": num_blocks, "block_size": block_size,
    }  # fmt: skip
    if num_rows < 0 or any(size is not None and size < 1 for size in sizes.values()):
        raise ValueError(f"sizes must be at least 1 and num_rows at least 0; found {sizes} and num_rows {num_rows}")
    if (num_blocks is None) != (block_size is None):
        raise ValueError(f"num_blocks and block_size belong together; found {num_blocks} and {block_size}")
    device = torch.device(device)
    chosen = choose_implementation(implementation, device, dtype)
    triton = chosen == "triton"
    if triton and tile_columns not in (None, vocab_size):
        raise ValueError(
            f"the Triton row pass takes whole rows: tile_columns must be {vocab_size}; found {tile_columns}"
        )
    narrows = dtype.itemsize == 2
    cpu = device.type == "cpu"
    onednn = gemm.is_onednn(device, dtype) and not triton  # its logits are tensors of its own
    if triton:
        tile, stride = vocab_size, aligned_stride(vocab_size)
    else:
        columns = _ONEDNN_TILE_COLUMNS if onednn else _CPU_TILE_COLUMNS if cpu else _GPU_TILE_COLUMNS
        tile = stride = min(vocab_size, tile_columns or columns)
    rows = chunk_rows or choose_chunk_rows(
        num_rows=num_rows,
        hidden_size=hidden_size,
        vocab_size=stride,
        row_bytes=stats.itemsize + (dtype.itemsize if narrows and not triton else 0),
        scratch_bytes=scratch_bytes,
        device_type=device.type,
        cpu_rows=_CPU_TILE_ROWS,
    )
    tiled, tiled16 = (0 if triton else rows), (0 if triton or not narrows else rows)

    def zeros(*shape: int, of: torch.dtype = stats) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    return LmHeadLossWorkspace(
        scratch=zeros(rows * (stride if triton else hidden_size if onednn else max(tile, hidden_size))),
        spare=zeros(min(tiled, _SPARE_ROWS), tile),
        narrow=zeros(tiled16, tile, of=dtype),
        gathered=zeros(tiled16, hidden_size, of=dtype),
        accumulated=zeros(rows if narrows else 0, hidden_size),
        row_stats=zeros(9, tiled, 1),
        row_columns=zeros(2, tiled, 1, of=torch.int64),
        row_flags=zeros(tiled, 1, of=torch.bool),
        row_index=torch.arange(num_rows, device=device),
        safe_labels=zeros(num_rows, of=torch.int64),
        counts=zeros(num_rows, of=torch.bool),
        ignored=zeros(num_rows, of=torch.bool),
        flags=zeros(num_rows, of=torch.bool),
        row_values=zeros(num_rows),
        source_rows=zeros(num_rows, of=torch.int64),
        block_values=zeros(num_blocks or 0, block_size or 0),
        block_flags=zeros(num_blocks or 0, block_size or 0, of=torch.bool),
        grad_hidden=zeros(num_rows, hidden_size, of=dtype),
        nll=zeros(num_rows),
        kl=zeros(num_rows),
        logsumexp=zeros(num_rows),
        label_rank=zeros(num_rows, of=torch.int64),
        row_weights=zeros(num_rows),
        loss_sum=zeros(),
        weight_sum=zeros(),
        implementation=chosen,
        vocab_size=vocab_size,
        chunk_rows=rows,
        tile_columns=tile,
        row_stride=stride,
        host_reads=cpu,
        # The CPU's 16-bit GEMM allocates scratch of its own, so the number of its calls may not depend on the data.
        skips_dead_chunks=cpu and not narrows and not triton,
    )
