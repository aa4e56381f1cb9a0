"""PTX and host code, read and translated: nothing here runs an instruction."""
