"""GGUF files: read as a source, written as a result, and the release that `fetch` makes of one."""
