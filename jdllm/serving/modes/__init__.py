"""The ways of generating that jdllm has, one file each."""
