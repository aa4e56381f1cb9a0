"""GEMMs of packed weights on WGMMA: what is decoded goes into the registers of operand A."""
