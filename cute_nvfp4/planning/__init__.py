"""Which kernel runs a problem: problems, candidates, models of their time, tables of measured winners.

No device code.
"""
