"""Compile what the operators really launch, for sm_90, on the CPU, and find it in the committed table.

Run by `test_compiled.py` in a process without TRITON_INTERPRET. Calls on tiny CPU tensors go through the operators as
usual, but a launch only compiles: Triton specialises it on its arguments as on a GPU, for a pretended device. Prints
one line for each launch: the kernel's name, what its code holds, and the cases of the table that hold the same.
"""

import os
from dataclasses import asdict, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench.kernel_table import TABLE, find_modules, load_cases, read_machine_code, read_table
from dflash_graph.kernels import block_attention_triton, fused_lm_head_loss_triton

CHIP = 90


class PretendedDevice:
    """As much of a Triton driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CHIP, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


TABLED = read_table(TABLE).get(triton.__version__, {})
CASES = load_cases(find_modules())
seen: set[str] = set()


def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    compiled = kernel.warmup(*args, grid=grid, **options)
    if compiled.hash in seen:
        return
    seen.add(compiled.hash)
    code = read_machine_code(compiled.asm["cubin"], compiled.metadata.shared)
    alike = [name for name, chips in TABLED.items() if chips.get(f"sm_{CHIP}") == asdict(code)]
    alike = [name for name in alike if name in CASES and CASES[name].kernel is kernel]
    print(f"{kernel.__name__} ({code.line()}) is {', '.join(alike) or 'not in the table'}", flush=True)


driver.set_active(PretendedDevice())
for module in (block_attention_triton, fused_lm_head_loss_triton):
    module.launch = compile_only  # type: ignore[attr-defined]
# The kernels are compiled ones by now; from here on, this only lets the operators choose Triton on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels import test_gpu as calls  # noqa: E402  (after the kernels were made)

case = replace(calls.REAL_ATTENTION, tokens=96, anchors=4, dead=1)
calls.attend(calls.attention_data("cpu", case), case, calls.attention_workspace("cpu", case, "triton"))
loss = replace(calls.REAL_LOSS, rows=12, hidden=64, vocab=1001, chunk_rows=8)
calls.evaluate(calls.loss_data("cpu", loss), loss, calls.loss_workspace("cpu", loss, "triton"))
