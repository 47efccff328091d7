"""Summaries keep more than the 8 or 11 bits of their operands: maps of many chunks multiply."""

from tests.kernel_script import run_script

CHECK = """
import torch
from megatron_tree_cp.comm import TreeContext
from megatron_tree_cp.ops.gdn import state_pass
from megatron_tree_cp.ops.gdn.tables import StateSlots, recurrence_tables
from megatron_tree_cp.plan import plan_row
from megatron_tree_cp.tree.packed_tree import PackedTree
from tests.ops_gdn.interpreter import accept_numpy

accept_numpy()
KEY, VALUE, HEADS = 16, 32, 2
ctx = TreeContext(plan_row(PackedTree((300, 70), (-1, -1)), 1), None, "cpu")
tables = recurrence_tables(ctx)
generator = torch.Generator().manual_seed(0)

def normal(*size):
    return torch.randn(*size, generator=generator)

k = torch.nn.functional.normalize(normal(370, 1, KEY), dim=2).half()
w = (0.2 * normal(370, HEADS, KEY)).half()
u = normal(370, HEADS, VALUE).half()
g = -0.002 * torch.rand(370, HEADS, generator=generator)
for begin, end in ((0, 300), (300, 370)):  # sums from every chunk's start
    for chunk in range(begin, end, 64):
        g[chunk : min(chunk + 64, end)] = g[chunk : min(chunk + 64, end)].cumsum(0)
none = torch.full((2,), -1, dtype=torch.int32)
slots = StateSlots(2, none, torch.arange(2, dtype=torch.int32))
table = torch.empty(2, HEADS, KEY, VALUE + KEY)
for level in tables.every:
    state_pass.summarise((k, w, u, g), level, slots, table, tables)

for run, (begin, end) in enumerate(((0, 300), (300, 370))):
    for head in range(HEADS):
        state = torch.cat([torch.zeros(KEY, VALUE), torch.eye(KEY)], 1).double()
        for chunk in range(begin, end, 64):
            rows = slice(chunk, min(chunk + 64, end))
            decay = g[rows, head].double()
            write = torch.cat([u[rows, head], torch.zeros(len(decay), KEY)], 1).double()
            write = write - w[rows, head].double() @ state
            write = write * torch.exp2(decay[-1] - decay)[:, None]
            state = state * torch.exp2(decay[-1]) + k[rows, 0].double().mT @ write
        for part in (slice(0, VALUE), slice(VALUE, None)):
            want = state[:, part]
            error = (table[run, head][:, part] - want).norm() / want.norm()
            assert error < 2e-5, (run, head, error)
print("summarised")
"""


def test_interpreted():
    assert "summarised" in run_script(CHECK, "cpu")
