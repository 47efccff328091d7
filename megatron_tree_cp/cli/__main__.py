"""`python -m megatron_tree_cp.cli` is `tree-cp`."""

import sys

from . import main

sys.exit(main())
