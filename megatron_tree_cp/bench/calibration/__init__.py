"""Measure what a device and its links cost, and fit the planner's cost profile to it.

`component` says what can be measured, `samples` which rows of work are, `measure` and `links` how
(by `watch`); `fit` and `coefficients` turn samples into a profile, `report` writes it.
"""
