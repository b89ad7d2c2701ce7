"""The converter as a process: progress, memory, versions, what the user names, what libraries print."""
