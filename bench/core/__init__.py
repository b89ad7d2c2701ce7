"""What every benchmark is made of: results, machines, processes, timing in turns."""
