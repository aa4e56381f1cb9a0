"""Runs the hackathon's problems: data, isolated submissions, checks, timing and reports."""
