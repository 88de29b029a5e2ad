"""Storage: pages of KV by content hash, beyond the life of a process. The one place below the cache where code waits.

`protocol.py` says what a store is, `store.py` is the async shell that all of them share, and `file_store.py`,
`valkey_store.py` and `mooncake_store.py` are the backends, which block and run in worker threads.
"""
