"""SpecForge's DFlash step: `OnlineDFlashModel` over `DFlashDraftModel`, SDPA, its default chunk of 128 blocks."""

from bench.peers.contestant import ModuleContestant, load_weights
from bench.peers.problem import Problem, frozen_embedding, frozen_head, qwen3_config


class SpecForge(ModuleContestant):
    note = (
        "runs the head on anchor rows too (weight 0), recomputes each chunk of logits in the backward, counts accuracy"
    )

    def __init__(self, problem: Problem) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        self.model = DFlashDraftModel(qwen3_config(problem.shape))
        load_weights(self.model, problem.take_parameters())
        self.trainer = OnlineDFlashModel(
            self.model,
            frozen_head(problem.embed),
            frozen_embedding(problem.embed),
            mask_token_id=problem.shape.mask_token_id,
            block_size=problem.shape.block_size,
            attention_backend="sdpa",
            num_anchors=problem.shape.anchors_per_row,
        )
        self.trainer._sample_anchor_positions = lambda seq_len, loss_mask, device: (
            problem.anchors,
            problem.anchors >= 0,
        )
        self.problem, self.loss_mask = problem, problem.tokens.new_ones(problem.tokens.shape).float()

    def step(self) -> None:
        loss, _, _ = self.trainer(self.problem.tokens, self.problem.features, self.loss_mask)
        loss.backward()
        self.last = loss.detach()
