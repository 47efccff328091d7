"""Packed prefix trees in Megatron: options, layers, data and the training entry.

The only library room that imports Megatron, and only from the modules that need it: `rows` and
`run_config` stay free of it for data workers and for entry points that set up the CPU shim first.
"""
