"""Mutants of compiled kernels: one PTX instruction changed or dropped at a time, each to be noticed.

``sites`` makes them from any PTX text, ``judge`` runs one under checks and several schedules, ``programs`` says which
kernels are tried, ``survivors`` proves harmless the ones that nothing notices. ``python -m
tests.simulator.mutation`` runs them all and prints a table.
"""
