"""Gated DeltaNet over packed prefix trees; README.md holds the maths and the reading order."""
