"""GEMMs of sm_90a: packed weights, decoded into the registers of operand A."""
