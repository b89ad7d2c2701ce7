"""The converter as a process: progress, memory, versions, imports of user code, and output of libraries."""
