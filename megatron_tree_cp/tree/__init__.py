"""What may be read: trajectories, packed prefix trees, visibility. Needs numpy only."""

from .errors import InputError
from .packed_tree import PackedTree
from .packing import Entries, PackedRow, pack_trajectories
from .trajectory import Trajectory

__all__ = [
    "Entries",
    "InputError",
    "PackedRow",
    "PackedTree",
    "Trajectory",
    "pack_trajectories",
]
