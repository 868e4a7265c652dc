"""`python -m jdllm`."""

from jdllm.cli import main

main()
