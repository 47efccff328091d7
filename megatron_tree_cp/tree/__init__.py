"""What may be read: trajectories, packed prefix trees, visibility. Needs numpy only."""

from .errors import InputError
from .fingerprint import packing_fingerprint
from .packed_tree import PackedTree
from .packing import Entries, PackedRow, pack_trajectories
from .readers import read_rollouts
from .row_files import load_rows, save_rows
from .summary import Capacity, PackingSummary, capacity, summarise
from .tokenizers import load_tokenizer
from .trajectory import Trajectory, check_vocabulary

__all__ = [
    "Capacity",
    "Entries",
    "InputError",
    "PackedRow",
    "PackedTree",
    "PackingSummary",
    "Trajectory",
    "capacity",
    "check_vocabulary",
    "load_rows",
    "load_tokenizer",
    "pack_trajectories",
    "packing_fingerprint",
    "read_rollouts",
    "save_rows",
    "summarise",
]
