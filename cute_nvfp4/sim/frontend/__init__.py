"""Reads PTX text and translates it to Python functions; nothing here runs an instruction."""
