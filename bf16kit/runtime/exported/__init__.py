"""A torch.export program (.pt2) as data: read by whitelist from its archive, and run call by call."""
