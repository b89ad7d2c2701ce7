"""The converter as a process: progress, memory, children, and the output and errors of libraries."""
