"""NeMo Automodel's DFlash step: `DFlashTrainerModule` over `Qwen3DFlashDraftModel`, SDPA, uniform weights."""

from bench.peers.contestant import ModuleContestant, load_weights
from bench.peers.problem import Problem, frozen_embedding, frozen_head, qwen3_config


class NemoAutomodel(ModuleContestant):
    note = "runs the head on anchor rows too, then drops them; counts accuracy and acceptance"

    def __init__(self, problem: Problem) -> None:
        from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
        from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

        self.model = Qwen3DFlashDraftModel(qwen3_config(problem.shape))
        load_weights(self.model, problem.take_parameters())
        self.trainer = DFlashTrainerModule(
            self.model,
            frozen_head(problem.embed),
            frozen_embedding(problem.embed),
            mask_token_id=problem.shape.mask_token_id,
            block_size=problem.shape.block_size,
            attention_backend="sdpa",
            num_anchors=problem.shape.anchors_per_row,
            loss_decay_gamma=None,
        )
        self.trainer._sample_anchor_positions = lambda seq_len, loss_mask, device, doc_remaining=None: (
            problem.anchors,
            problem.anchors >= 0,
        )
        self.problem, self.loss_mask = problem, problem.tokens.new_ones(problem.tokens.shape).float()

    def step(self) -> None:
        metrics = self.trainer(self.problem.tokens, self.problem.features, self.loss_mask)
        metrics.loss.backward()
        self.last = metrics.loss.detach()
