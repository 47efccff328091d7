"""The package's own entry: what a stock script does around `megatron.training.pretrain()`."""

from __future__ import annotations

import sys
from argparse import Namespace

from ..tree.errors import InputError
from .arguments import requested_backend
from .install import install
from .tree_model import model_config_from_args


def parse(argv: list[str]) -> Namespace:
    """Megatron's parsing and validation with the tree options; sets Megatron's globals."""
    if requested_backend(argv) != "tree":
        raise InputError(
            "this entry trains with --context-parallel-backend tree only; for 'te' start the "
            "stock Megatron script"
        )
    sys.argv = [sys.argv[0], *argv]
    install(exit_on_bad_input=False)
    from megatron.training.arguments import parse_and_validate_args

    return parse_and_validate_args()


def run(argv: list[str]) -> None:
    """Train; returns when Megatron's loop ends."""
    args = parse(argv)
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    config = pretrain_cfg_container_from_args(args, model_config_from_args(args))
    # The installed pretrain brings data provider and forward step.
    pretrain(config, None, ModelType.encoder_or_decoder, None)
