"""`python -m megatron_tree_cp.cli`: the `tree-cp` command, for torchrun."""

import sys

from . import main

sys.exit(main())
