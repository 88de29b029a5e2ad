"""Faces of the cache for code written against something else: SGLang's `mem_cache`, Hugging Face generation."""
