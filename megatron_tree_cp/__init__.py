"""Context parallelism for packed prefix trees: a Megatron-Core plugin.

The public names below load on first use, so that `import megatron_tree_cp` needs numpy only: data
and planner processes never pay for torch, and nothing but `megatron_tree_cp.megatron` imports
Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "PackedTree": "tree.packed_tree",
    "Trajectory": "tree.trajectory",
    "PackedRow": "tree.packing",
    "pack_trajectories": "tree.packing",
    "InputError": "tree.errors",
    "LayerClass": "plan.model",
    "ModelShape": "plan.model",
    "RowPlan": "plan.row_plan",
    "plan_row": "plan.planner",
    "TreeContext": "comm.context",
    "tree_logprobs": "megatron.logprobs",
}
_SUBMODULES = ("ops",)

__all__ = [
    "InputError",
    "LayerClass",
    "ModelShape",
    "PackedRow",
    "PackedTree",
    "RowPlan",
    "Trajectory",
    "TreeContext",
    "__version__",
    "ops",
    "pack_trajectories",
    "plan_row",
    "tree_logprobs",
]

if TYPE_CHECKING:
    from . import ops as ops
    from .comm.context import TreeContext as TreeContext
    from .megatron.logprobs import tree_logprobs as tree_logprobs
    from .plan.model import LayerClass as LayerClass
    from .plan.model import ModelShape as ModelShape
    from .plan.planner import plan_row as plan_row
    from .plan.row_plan import RowPlan as RowPlan
    from .tree.errors import InputError as InputError
    from .tree.packed_tree import PackedTree as PackedTree
    from .tree.packing import PackedRow as PackedRow
    from .tree.packing import pack_trajectories as pack_trajectories
    from .tree.trajectory import Trajectory as Trajectory


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name in _EXPORTS:
        value = getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
        globals()[name] = value  # the next access skips this function
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
