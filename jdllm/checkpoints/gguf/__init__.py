"""GGUF files as llama.cpp writes them: their weights and their tokenizers."""
