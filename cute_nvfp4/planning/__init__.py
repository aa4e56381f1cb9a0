"""Chooses the kernel that runs a problem: problems, candidates, models of their time, tables of measured winners.

There is no device code here.
"""
