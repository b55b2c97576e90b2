"""The two tables on hand-made rows, and that decoding with a table equals replaying it."""

from typing import Any

import numpy as np
import torch
import transformers

from dflash_graph.baselines import BigramTable, BlockTable
from dflash_graph.decoding import replay_accepts, speculative_decode


class Rows:
    """As much of TokenRows as a table reads."""

    def __init__(self, *rows: tuple[list[int], list[int]]) -> None:
        self.rows = [(np.array(t, np.int32), np.array(m, np.uint8)) for t, m in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> tuple[Any, Any]:
        return self.rows[i]


NOTHING = torch.zeros(0, 0)


def test_bigram_table_counts_supervised_successors_only() -> None:
    # Unsupervised 9s: 1 -> 9 three times must not count; 1 -> 2 once and 1 -> 3 twice are supervised.
    rows = Rows(
        ([1, 9, 1, 9, 1, 9, 1, 3], [0, 0, 0, 0, 0, 0, 0, 1]),
        ([1, 3, 4, 1, 2], [1, 1, 1, 1, 1]),
    )
    table = BigramTable(rows, block_size=4)  # type: ignore[arg-type]
    assert table.table == {1: 3, 3: 4, 4: 1}
    assert table.propose([7, 1], NOTHING) == [3, 4, 1]
    assert table.fallback == 3  # supervised and predictable: 3, 3, 4, 1, 2
    assert table.propose([8], NOTHING) == [3, 4, 1]


def test_ties_go_to_the_smallest_id() -> None:
    rows = Rows(([1, 7, 1, 5, 1, 6], [1] * 6))
    assert BigramTable(rows, block_size=2).propose([1], NOTHING) == [5]  # type: ignore[arg-type]
    assert BlockTable(rows, block_size=2).propose([1], NOTHING) == [5]  # type: ignore[arg-type]
    assert BigramTable(rows, block_size=2).fallback == 1  # type: ignore[arg-type]


def test_block_table_looks_up_anchor_and_distance() -> None:
    #        prompt | answer          anchors: supervised with a supervised successor
    rows = Rows(
        ([2, 2, 3, 4, 5, 6], [0, 0, 1, 1, 1, 1]),
        ([3, 4, 5, 8, 3, 9, 5, 8], [1, 1, 1, 1, 1, 1, 1, 1]),
        ([3, 4, 5, 10, 7, 7, 7], [1, 1, 0, 1, 0, 1, 1]),  # 10 is no anchor: its successor is not supervised
    )
    table = BlockTable(rows, block_size=4)  # type: ignore[arg-type]
    assert table.tables[0] == {3: 4, 4: 5, 5: 8, 8: 3, 9: 5, 7: 7}
    assert table.tables[1][3] == 5
    assert table.tables[2] == {3: 8, 4: 3, 5: 9, 8: 5}  # 3 -> 6, 8, 8, 10; 4 -> 3 only
    assert table.propose([1, 3], NOTHING) == [4, 5, 8]
    assert 2 not in table.tables[0]  # never supervised
    assert 10 not in table.tables[1]
    assert table.propose([2], NOTHING) == [table.fallback] * 3


def test_rows_shorter_than_a_block() -> None:
    rows = Rows(([4, 5], [1, 1]))
    assert BlockTable(rows, block_size=5).propose([4], NOTHING) == [5, 5, 5, 5]  # type: ignore[arg-type]


def test_decoding_with_a_table_equals_replaying_it() -> None:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    rows = []
    for seed in range(4):
        prompt = [seed, 5]
        text = speculative_decode(model, _Zeros(), prompt, max_new_tokens=30, eos_ids=frozenset())
        rows.append(([*prompt, *text.tokens], [0, 0] + [1] * 30))
    total = 0
    for table in (BigramTable(Rows(*rows), 4), BlockTable(Rows(*rows), 4)):  # type: ignore[arg-type]
        for seed in range(4, 8):
            prompt = [seed, 5]
            live = speculative_decode(model, table, prompt, max_new_tokens=30, eos_ids={seed})
            other = speculative_decode(model, _Zeros(), prompt, max_new_tokens=30, eos_ids={seed})
            assert live.tokens == other.tokens
            assert replay_accepts(table, other) == list(live.accepts)
            total += sum(live.accepts)
    assert total > 0


class _Zeros:
    block_size = 4
    target_layer_ids: tuple[int, ...] = ()

    def reset(self) -> None:
        pass

    def propose(self, tokens: Any, features: Any) -> list[int]:
        return [0, 0, 0]
