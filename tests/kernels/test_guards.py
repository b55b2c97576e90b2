"""What the operators refuse, and what they hold under compilers, threads and odd callers."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels import block_attention as attention_op
from dflash_graph.kernels import fused_lm_head_loss as loss_op
from dflash_graph.kernels import teacher_statistics as teacher_op
from dflash_graph.kernels.backend import Implementation

R, D, V = 6, 8, 20
BAD_COUNTS = [2.0, True, -1, 99, torch.tensor(2.0), torch.tensor([2]), torch.tensor(2, device="meta")]


def loss_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(R, D, requires_grad=True), torch.randn(V, D), torch.randint(0, V, (R,)), torch.ones(R)


def loss_workspace(implementation: Implementation = "torch") -> loss_op.LmHeadLossWorkspace:
    return loss_op.make_workspace(
        num_rows=R, hidden_size=D, vocab_size=V, dtype=torch.float32, device="cpu", implementation=implementation
    )


def attend(anchors: list[int], starts: list[int], num_anchors: Any, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    a, tokens = len(anchors), 80
    q, k_block, v_block = (torch.randn(a, 2, 1, 16, generator=generator) for _ in range(3))
    k, v = (torch.randn(tokens, 1, 16, generator=generator) for _ in range(2))
    ws = attention_op.make_workspace(
        num_anchors=a, block_size=2, num_tokens=tokens, num_heads=1, num_key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )  # fmt: skip
    return attention_op.block_attention(
        q, k, v, k_block, v_block, torch.tensor(anchors), torch.tensor(starts), num_anchors=num_anchors, scale=0.25,
        causal=False, sliding_window=None, workspace=ws,
    )  # fmt: skip


@pytest.mark.parametrize("count", BAD_COUNTS)
def test_counts_that_are_no_integers_here_are_refused(count: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="num_rows"):
        loss_op.fused_lm_head_loss(*loss_inputs(), count, workspace=loss_workspace())
    with pytest.raises((TypeError, ValueError), match="num_anchors"):
        attend([3], [0], count)
    ws = teacher_op.make_workspace(num_rows=R, hidden_size=D, vocab_size=V, dtype=torch.float32, device="cpu")
    with pytest.raises((TypeError, ValueError), match="num_rows"):
        teacher_op.teacher_statistics(
            torch.randn(R, D), torch.randn(V, D), count, mean=None, entropy=torch.empty(R),
            argmax=torch.empty(R, dtype=torch.int64), workspace=ws,
        )  # fmt: skip


def test_a_device_with_its_index_is_the_same_device() -> None:
    assert torch.equal(attend([3, 5], [0, 0], 2, "cpu:0"), attend([3, 5], [0, 0], 2, "cpu"))


def test_blocks_without_context_between_others_do_not_lend_theirs() -> None:
    """Unsorted: two rows' first positions, and then a block of the first row that has a context."""
    together = attend([0, 64, 0, 5], [0, 64, 0, 0], 4)
    for block in range(4):
        # Alone: every other block sees another row's first position, that is nothing.
        anchors, starts = [64] * 4, [64] * 4
        anchors[block], starts[block] = [0, 64, 0, 5][block], [0, 64, 0, 0][block]
        torch.testing.assert_close(together[block], attend(anchors, starts, 4)[block])


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_rows_that_the_teacher_does_not_know_do_not_count(implementation: Implementation) -> None:
    hidden, head, labels, weights = loss_inputs()
    rows = torch.tensor([0, 1, 4, -1, 10**9, 2])
    teacher = loss_op.Teacher(weight=0.5, mean=torch.randn(4, D), entropy=torch.rand(4), rows=rows)
    ws = loss_workspace(implementation)
    loss = loss_op.fused_lm_head_loss(hidden, head, labels, weights, workspace=ws, teacher=teacher)
    loss.backward()
    grad, known = hidden.grad, torch.tensor([0, 1, 5])
    assert grad is not None
    assert ws.weight_sum == 3
    assert grad[2:5].eq(0).all()
    assert ws.kl[2:5].eq(0).all()
    alone = hidden.detach()[known].requires_grad_()
    fewer = loss_op.Teacher(weight=0.5, mean=teacher.mean, entropy=teacher.entropy, rows=rows[known])
    same = loss_op.fused_lm_head_loss(
        alone, head, labels[known], weights[known], workspace=loss_workspace(implementation), teacher=fewer
    )
    torch.testing.assert_close(loss, same)


def test_weights_and_leaves_that_would_lose_their_gradient_are_refused() -> None:
    hidden, head, labels, weights = loss_inputs()
    with pytest.raises(ValueError, match="weights never get a gradient"):
        loss_op.fused_lm_head_loss(hidden, head, labels, weights.requires_grad_(), workspace=loss_workspace())
    for rows in (hidden, hidden.view(R, D)):
        with pytest.raises(ValueError, match="lend_grad"):
            loss_op.fused_lm_head_loss(rows, head, labels, torch.ones(R), workspace=loss_workspace(), lend_grad=True)


def test_a_compiled_caller_is_refused_what_an_eager_one_is() -> None:
    _, head, labels, weights = loss_inputs()
    ws = loss_workspace()

    @torch.compile(backend="eager")
    def twice(a: Tensor, b: Tensor) -> Tensor:
        first = loss_op.fused_lm_head_loss(a * 2, head, labels, weights, workspace=ws)
        return first + loss_op.fused_lm_head_loss(b * 2, head, labels, weights, workspace=ws)

    a, b = loss_inputs()[0], loss_inputs()[0]
    with pytest.raises(RuntimeError, match="used by another forward"):
        twice(a, b).backward()


def test_two_threads_share_the_interpreter() -> None:
    _, head, labels, weights = loss_inputs()
    hidden = torch.randn(R, D)
    workspaces = [loss_workspace("triton") for _ in range(2)]
    expected = loss_op.fused_lm_head_loss(hidden, head, labels, weights, workspace=loss_workspace("triton"))
    found: list[Tensor] = []

    def work(ws: loss_op.LmHeadLossWorkspace) -> None:
        for _ in range(10):
            found.append(loss_op.fused_lm_head_loss(hidden, head, labels, weights, workspace=ws))

    threads = [threading.Thread(target=work, args=(ws,)) for ws in workspaces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(torch.equal(loss, expected) for loss in found)
