"""What a step counts on the device, without a sync: losses, ranks by block position, updates not made.

Every number is accumulated in place by the step's own operators and read by the host once per log interval. Owned by
`step.py`; reports turn the sums into ratios (`counts.py`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Device counters read back to the host, summed since the last read. Arrays are (K-1,), index k-1.

    Attributes:
        rows, correct, correct_top_k: supervised rows per block position, and those whose label ranks first, or in the
            top k. A label outside the reduced head is a row that is never correct.
        blocks, leading: blocks whose rows 1..k are all supervised, and those of them whose rows 1..k are all correct.
        skipped_steps, skipped_in_a_row: updates not made (non-finite gradient or no trained row), and their longest
            streak.
        nll_sum, kl_sum: the two parts of loss_sum before they are mixed; None where no KL was trained.
    """

    loss_sum: float
    weight_sum: float
    rows: np.ndarray
    correct: np.ndarray
    correct_top_k: np.ndarray
    blocks: np.ndarray
    leading: np.ndarray
    grad_norm: float
    skipped_steps: int
    skipped_in_a_row: int
    nll_sum: float | None = None
    kl_sum: float | None = None

    @property
    def accept_length(self) -> float:
        """Expected tokens per verification under teacher forcing, bonus included: 1 + sum of P(rows 1..k right)."""
        seen = self.blocks > 0
        return 1.0 + float((self.leading[seen] / self.blocks[seen]).sum())


class StepCounters:
    """Device sums of all micro-steps and updates since the last `read`. K is the block size.

    Attributes:
        correct: (A*K,) float32 scratch.
    """

    def __init__(self, *, block_size: int, num_rows: int, correct: Tensor) -> None:
        device, self._block_size, self._correct = correct.device, block_size, correct
        self._row_index = torch.arange(num_rows, device=device)
        self._sums = torch.zeros(4, device=device, dtype=torch.float64)  # loss, weight, nll, KL
        self._with_kl = False  # the last two were counted
        self._per_k = torch.zeros(3, block_size - 1, device=device, dtype=torch.float64)  # correct, leading, top k
        self._rows = np.zeros(block_size - 1, dtype=np.int64)  # on the host: padding knows rows and blocks
        self._blocks = np.zeros(block_size - 1, dtype=np.int64)
        self._grad_norm = torch.zeros((), device=device)
        self._skipped = torch.zeros(3, device=device)  # in all, in a row now, longest streak

    def add_loss(self, loss: Tensor, weight_sum: Tensor) -> None:
        """Add a micro-step's sums of w*loss and of w, both ()."""
        self._sums[0].add_(loss)
        self._sums[1].add_(weight_sum)

    def add_parts(self, weights: Tensor, nll: Tensor, kl: Tensor) -> None:
        """Add the two parts of a mixed loss; all (R,), weights 0 where a row does not count."""
        self._sums[2].add_((weights * nll).sum())
        self._sums[3].add_((weights * kl).sum())

    def add_ranks(self, num_blocks: int, rows: Tensor, num_rows: Tensor, rank: Tensor) -> None:
        """Count right rows and leading runs of them in `num_blocks` blocks.

        Args:
            rows: (R,) int64 ascending places block * K + k of trained rows, of which the first num_rows, (), count.
            rank: (R,) rank of each row's label.
        """
        live = self._row_index[: rows.shape[0]] < num_rows
        # Padded rows point at index 0, an anchor row, which no counter reads; all other indices are distinct.
        correct = self._spread(num_blocks, rows, live & (rank == 0))
        self._per_k[0] += correct.sum(0)
        self._per_k[1] += correct.cumprod(1).sum(0)
        self._per_k[2] += self._spread(num_blocks, rows, live & (rank < TOP_K)).sum(0)

    def _spread(self, num_blocks: int, rows: Tensor, right: Tensor) -> Tensor:  # (a, K-1)
        k = self._block_size
        places = self._correct[: num_blocks * k].zero_().scatter_(0, rows, right.float())
        return places.view(num_blocks, k)[:, 1:]

    def add_update(self, grad_norm: Tensor, skipped: Tensor) -> None:
        """Count one update: its gradient norm, and whether it was skipped (1.0 or 0.0), both ()."""
        self._grad_norm.copy_(grad_norm)
        self._skipped[0].add_(skipped)
        self._skipped[1].add_(1).mul_(skipped)
        torch.maximum(self._skipped[1], self._skipped[2], out=self._skipped[2])

    def add_host(self, rows_per_k: np.ndarray, blocks_per_k: np.ndarray, *, with_kl: bool) -> None:
        """Count what padding knows of a micro-step's job, (K-1,) each, and whether its loss had a KL."""
        self._rows += rows_per_k
        self._blocks += blocks_per_k
        self._with_kl |= with_kl

    def tensors(self) -> dict[str, Tensor]:
        """All device sums, by name."""
        return {
            "sums": self._sums,
            "per_k": self._per_k,
            "grad_norm": self._grad_norm,
            "skipped": self._skipped,
        }

    def read(self) -> Counts:
        """Read and reset (skipped steps in a row are kept)."""
        # sync: once per log interval, outside the step
        sums, per_k, skipped = self._sums.tolist(), self._per_k.cpu().numpy().copy(), self._skipped.tolist()
        counts = Counts(
            loss_sum=sums[0],
            weight_sum=sums[1],
            rows=self._rows.astype(np.float64),
            correct=per_k[0],
            blocks=self._blocks.astype(np.float64),
            leading=per_k[1],
            correct_top_k=per_k[2],
            grad_norm=float(self._grad_norm),
            skipped_steps=int(skipped[0]),
            skipped_in_a_row=int(skipped[2]),
            nll_sum=sums[2] if self._with_kl else None,
            kl_sum=sums[3] if self._with_kl else None,
        )
        self._sums.zero_()
        self._with_kl = False
        self._per_k.zero_()
        self._rows[:] = self._blocks[:] = 0
        self._skipped[0].zero_()
        self._skipped[2].zero_()
        return counts
