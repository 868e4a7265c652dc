"""Rounding of matrices that looks at what they multiply: GPTQ, layer by layer."""
