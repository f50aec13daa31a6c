"""GGUF files of llama.cpp, read as the models from which they were converted."""
