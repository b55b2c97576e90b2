"""speculators' DFlash step: `DFlashDraftModel` with SDPA, rows packed into one sequence, CE on the teacher's argmax.

It has no labels from the data. The teacher's last hidden state at position p is the embedding of token p+1, whose
largest logit is that token's own, so that its labels are the data's.
"""

from math import inf

import torch

from bench.peers.contestant import ModuleContestant, load_weights
from bench.peers.problem import Problem, qwen3_config


class Speculators(ModuleContestant):
    note = (
        "also runs the teacher's head on every block row to get labels; packs all rows into one sequence, so its dense "
        "attention spans all of them; head on anchor rows too; its fused losses are Triton only, so CE is eager"
    )

    def __init__(self, problem: Problem) -> None:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        shape, layer_config = problem.shape, qwen3_config(problem.shape)
        config = DFlashSpeculatorConfig(
            transformer_layer_config=layer_config,
            draft_vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=layer_config.dflash_config["target_layer_ids"],
            mask_token_id=shape.mask_token_id,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.block_size - 1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        self.model = DFlashDraftModel(config)
        load_weights(self.model, problem.take_parameters())
        for module in (self.model.embed_tokens, self.model.lm_head, self.model.verifier_lm_head):
            module.weight = torch.nn.Parameter(problem.embed, requires_grad=False)
        torch.nn.init.ones_(self.model.verifier_norm.weight)
        flat = (problem.anchors + torch.arange(shape.num_rows)[:, None] * shape.row_length).flatten()
        core.select_anchors = lambda loss_mask, num_anchors, block_size: (flat, flat >= 0)
        self.inputs = {
            "hidden_states": problem.features.flatten(0, 1)[None],
            "input_ids": problem.tokens.view(1, -1),
            "loss_mask": torch.ones(1, shape.num_tokens),
            "verifier_last_hidden_states": problem.embed[problem.tokens.flatten().roll(-1)][None],
            "document_ids": torch.arange(shape.num_rows).repeat_interleave(shape.row_length)[None],
            "position_ids": torch.arange(shape.row_length).repeat(shape.num_rows)[None],
            "loss_config": resolve_loss_config("ce", "eager"),
            "gamma": inf,  # uniform weights
            "max_anchors": shape.num_anchors,
        }
        # The teacher's hidden states are an input, as the taps are.
        self.not_extra_bytes = self.inputs["verifier_last_hidden_states"].nbytes

    def step(self) -> None:
        _, loss, _ = self.model(**self.inputs)
        loss.backward()
        self.last = loss.detach()
