"""The quantization of one block in registers, rule by rule."""
