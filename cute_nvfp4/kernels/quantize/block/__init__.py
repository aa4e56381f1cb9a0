"""How one block is quantized, rule by rule, in registers."""
