"""PTX text, read and translated: nothing here runs an instruction."""
