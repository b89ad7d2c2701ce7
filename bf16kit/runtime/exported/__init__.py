"""A torch.export program (.pt2) as data: read from its archive by whitelist, and run call by call."""
